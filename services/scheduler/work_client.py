"""The scheduler's calls to the store: plain values in and out, dispatches as they travel on."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from protos.nightshift.v1 import work_pb2
from protos.nightshift.v1.dispatch_pb2 import Dispatch
from protos.nightshift.v1.work_pb2_grpc import WorkStub
from services.kit.calls import rpc
from services.kit.process import failpoints
from services.kit.wire.errors import from_rpc_error
from services.kit.wire.ids import BatchId, PoolId
from services.scheduler.domain.chunker import Cut
from services.scheduler.domain.report import PoolReport
from services.scheduler.domain.window import BATCHES_PER_POOL, Window, WindowBatch

if TYPE_CHECKING:
    from protos.nightshift.v1.work_pb2_grpc import WorkAsyncStub

WORK_SERVICE: Final = "nightshift.v1.Work"
"""By which the store's health service calls what is asked for here."""


@dataclass(frozen=True, slots=True)
class Lead:
    """The store's word on who leads.

    Attributes:
        leads: whether the caller does.
        term: the current term.
        holder: who leads.
        left_seconds: time left of the lease.
    """

    leads: bool
    term: int
    holder: str
    left_seconds: float


@dataclass(frozen=True, slots=True)
class WindowAnswer:
    """The window, every pool that a model names, and the store's clock (ms since the epoch)."""

    window: Window
    pool_ids: tuple[PoolId, ...]
    now_ms: int


class WorkClient:
    """Calls `Work` as the scheduler. Every method may raise a `NightshiftError`."""

    def __init__(self, channel: rpc.Channel, secret: str) -> None:
        """Call over `channel`, which the caller closes."""
        self._stub: WorkAsyncStub = WorkStub(channel)
        self._metadata = rpc.metadata(secret)

    async def lead(self, holder: str, ttl_seconds: float) -> Lead:
        """Take, renew or learn of the leadership."""
        with _errors(), failpoints.around("store.lead"):
            answer = await self._stub.Lead(
                work_pb2.LeadRequest(holder=holder, ttl_ms=int(ttl_seconds * 1000)),
                metadata=self._metadata,
            )
        return Lead(answer.leader, answer.term, answer.current_holder, answer.left_ms / 1000)

    async def resign(self, holder: str, term: int) -> None:
        """Give the leadership up."""
        with _errors(), failpoints.around("store.resign"):
            await self._stub.Resign(
                work_pb2.ResignRequest(holder=holder, term=term), metadata=self._metadata
            )

    async def window(self, term: int) -> WindowAnswer:
        """Return what may run now.

        Raises:
            StaleTermError: the term is over.
        """
        with _errors():
            answer = await self._stub.GetWindow(
                work_pb2.GetWindowRequest(term=term, batches_per_pool=BATCHES_PER_POOL),
                metadata=self._metadata,
            )
        return WindowAnswer(
            # An older store does not say.
            Window.of(map(_batch_of, answer.batches), answer.batches_per_pool or BATCHES_PER_POOL),
            tuple(map(PoolId, answer.pool_ids)),
            answer.now_ms,
        )

    async def cut(self, term: int, cuts: Sequence[Cut]) -> list[Dispatch]:
        """Cut chunks in the order given; those that found no lines or no open batch are left out.

        Raises:
            StaleTermError: the term is over.
        """
        request = work_pb2.CutChunksRequest(
            term=term,
            cuts=[
                work_pb2.Cut(
                    batch_id=each.batch_id,
                    pool_id=each.pool_id,
                    max_lines=each.max_lines,
                    max_bytes=each.max_bytes,
                )
                for each in cuts
            ],
        )
        with _errors(), failpoints.around("store.cut"):
            answer = await self._stub.CutChunks(request, metadata=self._metadata)
        return list(answer.dispatches)

    async def report_pools(self, term: int, reports: Sequence[PoolReport]) -> None:
        """Tell what is heard of pools.

        Raises:
            StaleTermError: the term is over.
        """
        request = work_pb2.ReportPoolsRequest(
            term=term,
            pools=[
                work_pb2.PoolReport(
                    pool_id=each.pool_id,
                    executors_alive=each.alive,
                    executors_ready=each.ready,
                    seats=each.seats,
                    lines_per_second=each.lines_per_second,
                    trouble=each.trouble,
                )
                for each in reports
            ],
        )
        with _errors(), failpoints.around("store.report_pools"):
            await self._stub.ReportPools(request, metadata=self._metadata)

    async def reclaim(self, term: int, pending: Mapping[PoolId, int]) -> list[Dispatch]:
        """Raise the dispatch of chunks without a live lease.

        Args:
            term: the caller's.
            pending: messages published and not delivered, of the pools whose consumers answered.

        Raises:
            StaleTermError: the term is over.
        """
        request = work_pb2.ReclaimChunksRequest(
            term=term,
            queues=[
                work_pb2.PoolQueue(pool_id=pool_id, pending=number)
                for pool_id, number in pending.items()
            ],
        )
        with _errors(), failpoints.around("store.reclaim"):
            answer = await self._stub.ReclaimChunks(request, metadata=self._metadata)
        return list(answer.dispatches)


def _batch_of(batch: work_pb2.WindowBatch) -> WindowBatch:
    return WindowBatch(
        batch_id=BatchId(batch.batch_id),
        seq=batch.seq,
        pool_id=PoolId(batch.pool_id),
        lines_total=batch.lines_total,
        lines_cut=batch.lines_cut,
        expires_at_ms=batch.expires_at_ms,
        line_bytes_mean=batch.line_bytes_mean,
        several_models=batch.several_models,
    )


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except rpc.CallFault as fault:
        raise from_rpc_error(fault) from fault
