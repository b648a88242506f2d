"""The scheduler's part of `Work`, scripted: a true gRPC server over batches held in memory."""

import asyncio
import time
from collections import defaultdict, deque
from typing import Any

import grpc

from protos.nightshift.v1 import common_pb2, dispatch_pb2, work_pb2, work_pb2_grpc
from services.kit.calls import interceptors, rpc
from services.kit.wire.errors import StaleTermError

SECRET = "0" * 64
FAR_MS = 10**15


class ScriptedWindow(work_pb2_grpc.WorkServicer):
    """Leads by the same rules as the store, cuts lines of equal size, and logs what it is asked."""

    def __init__(self) -> None:
        """Hold no batch yet."""
        self.batches: dict[str, work_pb2.WindowBatch] = {}
        self.pool_ids: list[str] = []
        #: Dispatches that the next `ReclaimChunks` hands out.
        self.freed: list[dispatch_pb2.Dispatch] = []
        #: Batches that are listed, but that `CutChunks` finds closed.
        self.closed: set[str] = set()
        #: What the next calls of a method raise instead of answering.
        self.failures: dict[str, deque[Exception]] = defaultdict(deque)
        #: Methods whose answers, decided already, wait for an event of the test's.
        self.held: dict[str, asyncio.Event] = {}
        self.calls: list[tuple[str, Any]] = []
        self.holder = ""
        self.term = 0
        self._until = 0.0
        self._chunks = 0

    def add_batch(self, batch_id: str, pool_id: str, lines: int) -> None:
        """Let a batch be ready, after those that are there."""
        self.batches[batch_id] = work_pb2.WindowBatch(
            batch_id=batch_id,
            seq=len(self.batches) + 1,
            pool_id=pool_id,
            lines_total=lines,
            expires_at_ms=FAR_MS,
            line_bytes_mean=100,
        )
        if pool_id not in self.pool_ids:
            self.pool_ids.append(pool_id)

    def called(self, method: str) -> int:
        """Return how often a method was called."""
        return sum(name == method for name, _ in self.calls)

    async def serve(self, listen: str = "127.0.0.1:0") -> rpc.RunningServer:
        """Serve on a free port; the caller stops it."""
        return await rpc.start_server(
            listen,
            [
                rpc.ServiceEntry(
                    "nightshift.v1.Work", self, work_pb2_grpc.add_WorkServicer_to_server
                )
            ],
            [interceptors.SecretInterceptor(SECRET), interceptors.ErrorsInterceptor()],
        )

    async def Lead(
        self, request: work_pb2.LeadRequest, context: grpc.aio.ServicerContext
    ) -> work_pb2.LeadResponse:
        self._enter("Lead", request)
        now = time.monotonic()
        if request.holder == self.holder or now >= self._until:
            if request.holder != self.holder or now >= self._until:
                self.term += 1
            self.holder = request.holder
            self._until = now + request.ttl_ms / 1000
        answer = work_pb2.LeadResponse(
            leader=request.holder == self.holder,
            term=self.term,
            current_holder=self.holder,
            left_ms=max(0, int((self._until - now) * 1000)),
        )
        if "Lead" in self.held:
            await self.held["Lead"].wait()
        return answer

    async def Resign(
        self, request: work_pb2.ResignRequest, context: grpc.aio.ServicerContext
    ) -> work_pb2.ResignResponse:
        self._enter("Resign", request)
        if (request.holder, request.term) == (self.holder, self.term):
            self.holder, self._until = "", 0.0
        return work_pb2.ResignResponse()

    async def GetWindow(
        self, request: work_pb2.GetWindowRequest, context: grpc.aio.ServicerContext
    ) -> work_pb2.GetWindowResponse:
        self._enter("GetWindow", request)
        return work_pb2.GetWindowResponse(
            batches=[each for each in self.batches.values() if each.lines_cut < each.lines_total],
            pool_ids=self.pool_ids,
            now_ms=int(time.time() * 1000),
        )

    async def CutChunks(
        self, request: work_pb2.CutChunksRequest, context: grpc.aio.ServicerContext
    ) -> work_pb2.CutChunksResponse:
        self._enter("CutChunks", request)
        found = (self._cut(each) for each in request.cuts)
        return work_pb2.CutChunksResponse(dispatches=[each for each in found if each is not None])

    async def ReportPools(
        self, request: work_pb2.ReportPoolsRequest, context: grpc.aio.ServicerContext
    ) -> work_pb2.ReportPoolsResponse:
        self._enter("ReportPools", request)
        return work_pb2.ReportPoolsResponse()

    async def ReclaimChunks(
        self, request: work_pb2.ReclaimChunksRequest, context: grpc.aio.ServicerContext
    ) -> work_pb2.ReclaimChunksResponse:
        self._enter("ReclaimChunks", request)
        freed, self.freed = self.freed, []
        return work_pb2.ReclaimChunksResponse(dispatches=freed)

    def _enter(self, method: str, request: Any) -> None:
        self.calls.append((method, request))
        if self.failures[method]:
            raise self.failures[method].popleft()
        if method not in {"Lead", "Resign"} and request.term != self.term:
            raise StaleTermError("another scheduler leads")

    def _cut(self, cut: work_pb2.Cut) -> dispatch_pb2.Dispatch | None:
        batch = self.batches[cut.batch_id]
        lines = min(cut.max_lines, batch.lines_total - batch.lines_cut)
        if lines == 0 or cut.batch_id in self.closed:
            return None
        self._chunks += 1
        first = batch.lines_cut
        batch.lines_cut += lines
        return dispatch_pb2.Dispatch(
            version=1,
            batch_id=batch.batch_id,
            chunk_id=f"chunk_{self._chunks:032x}",
            dispatch=1,
            pool_id=batch.pool_id,
            lines=[common_pb2.LineRange(first=first, count=lines)],
            line_count=lines,
            input_bytes=100 * lines,
            expires_at_ms=batch.expires_at_ms,
        )
