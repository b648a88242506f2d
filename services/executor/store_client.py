"""What an executor asks of the store."""

from collections.abc import AsyncIterator, Iterable
from typing import Final, Protocol, TypeVar

from protos.nightshift.v1 import common_pb2, work_pb2, work_pb2_grpc
from services.kit.calls import rpc
from services.kit.process import failpoints

Range = tuple[int, int]
"""First line and number of lines."""
Marks = list[tuple[str, list[Range]]]
"""Tokens of attempts, each with lines that are, or were, in the engine."""

_UNTOLD_RESULT_BYTES: Final = 32 * 1024 * 1024
"""Longest result line for a store that names none, such as one of an earlier version."""

Answer_co = TypeVar("Answer_co", covariant=True)


class AnswerStream(Protocol[Answer_co]):
    """A call whose answers are iterated over; it stays open until it ends or is cancelled."""

    def __aiter__(self) -> AsyncIterator[Answer_co]:
        """Walk over the answers."""
        ...

    def cancel(self) -> bool:
        """End the call; false when it had ended."""
        ...


class StoreClient:
    """The calls of one executor; all raise `rpc.CallFault`."""

    def __init__(
        self, channel: rpc.Channel, *, secret: str, executor_id: str, incarnation: str
    ) -> None:
        """Speak for `executor_id` in its present life, `incarnation`."""
        self._stub = work_pb2_grpc.WorkStub(channel)
        self._secret = secret
        self.executor_id = executor_id
        self.incarnation = incarnation
        self.max_result_bytes = _UNTOLD_RESULT_BYTES
        """Longest result line that the store takes, as it said when this executor registered."""

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return rpc.metadata(self._secret)

    async def register(
        self,
        *,
        pool_id: str,
        models: Iterable[str],
        endpoints: Iterable[str],
        context_length: int | None,
        engine_revision: str,
    ) -> None:
        """Present itself; attempts of an earlier life are handed back by it."""
        with failpoints.around("store.register"):
            answer = await self._stub.RegisterExecutor(
                work_pb2.RegisterExecutorRequest(
                    executor_id=self.executor_id,
                    incarnation=self.incarnation,
                    pool_id=pool_id,
                    models=models,
                    endpoints=sorted(endpoints),
                    context_length=context_length,
                    engine_revision=engine_revision,
                ),
                metadata=self._metadata(),
            )
            self.max_result_bytes = answer.max_result_bytes or _UNTOLD_RESULT_BYTES

    async def open_attempt(
        self, chunk_id: str, dispatch: int, num_delivered: int
    ) -> work_pb2.OpenAttemptResponse:
        """Begin an attempt for one delivery."""
        with failpoints.around("store.open"):
            return await self._stub.OpenAttempt(
                work_pb2.OpenAttemptRequest(
                    chunk_id=chunk_id,
                    dispatch=dispatch,
                    num_delivered=num_delivered,
                    executor_id=self.executor_id,
                    incarnation=self.incarnation,
                ),
                metadata=self._metadata(),
            )

    def read_lines(
        self, token: str, ranges: Iterable[Range]
    ) -> AnswerStream[work_pb2.ReadLinesResponse]:
        """Stream lines of an open attempt; cancel the call when done with it."""
        return self._stub.ReadLines(
            work_pb2.ReadLinesRequest(token=token, lines=_ranges(ranges)),
            metadata=self._metadata(),
        )

    def append_results(
        self, messages: AsyncIterator[work_pb2.AppendResultsRequest]
    ) -> AnswerStream[work_pb2.AppendResultsResponse]:
        """Stream result frames; cancel the call when done with it."""
        return self._stub.AppendResults(messages, metadata=self._metadata())

    async def beat(self, marks: Marks) -> work_pb2.BeatResponse:
        """Keep attempts alive; learn which to drop."""
        with failpoints.around("store.beat"):
            return await self._stub.Beat(
                work_pb2.BeatRequest(executor_id=self.executor_id, attempts=_beats(marks)),
                metadata=self._metadata(),
            )

    async def hand_back(self, tokens: Iterable[str], trouble: str = "") -> None:
        """End attempts without finishing them; `trouble` says why they cannot be run here."""
        with failpoints.around("store.hand_back"):
            await self._stub.HandBack(
                work_pb2.HandBackRequest(
                    executor_id=self.executor_id, tokens=tokens, trouble=trouble
                ),
                metadata=self._metadata(),
            )

    async def report_death(
        self, marks: Marks, reason: str, *, complete: bool, start_seconds: float
    ) -> None:
        """Say which lines were in the engine when it died; ends their attempts.

        `complete`: nothing else was in it, lines that were being aborted included.
        `start_seconds`: how long it had taken to start.
        """
        with failpoints.around("store.report_death"):
            await self._stub.ReportDeath(
                work_pb2.ReportDeathRequest(
                    executor_id=self.executor_id,
                    attempts=_beats(marks),
                    reason=reason,
                    complete=complete,
                    start_ms=int(start_seconds * 1000),
                ),
                metadata=self._metadata(),
            )


def ranges_of(lines: list[int]) -> list[Range]:
    """Return ascending ordinals as ranges."""
    found: list[Range] = []
    for line in lines:
        if found and sum(found[-1]) == line:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((line, 1))
    return found


def without_first(ranges: Iterable[Range], lines: int) -> list[Range]:
    """Return the ranges without their first `lines` lines."""
    rest: list[Range] = []
    for first, count in ranges:
        skipped = min(count, lines)
        lines -= skipped
        if skipped < count:
            rest.append((first + skipped, count - skipped))
    return rest


def _ranges(ranges: Iterable[Range]) -> list[common_pb2.LineRange]:
    return [common_pb2.LineRange(first=first, count=count) for first, count in ranges]


def _beats(marks: Marks) -> list[work_pb2.AttemptBeat]:
    return [work_pb2.AttemptBeat(token=token, started=_ranges(started)) for token, started in marks]
