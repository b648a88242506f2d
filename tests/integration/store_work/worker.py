"""What a scheduler and executors say to a store, and the frames that they send."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from protos.nightshift.v1 import batches_pb2, common_pb2, dispatch_pb2, work_pb2
from services.kit.wire.frames import FAILED_FLAG, FRAME_BYTES, LINE_RECORD, RESULT_RECORD
from services.kit.wire.result_line import success_or_error_line
from tests.kit.store import DAY_SECONDS, POOL, Client, chat_line, our_errors
from tests.kit.streams import all_told

TTL_MS = 20_000
Range = tuple[int, int]


def in_pieces(whole: work_pb2.AppendResultsRequest) -> list[work_pb2.AppendResultsRequest]:
    """Return a frame as an executor sends one that is too large for a message: in several."""
    size = 1 << 20
    return [
        work_pb2.AppendResultsRequest(
            token=whole.token,
            frame=whole.frame,
            records=b"" if start else whole.records,
            payload=whole.payload[start : start + size],
            more=start + size < len(whole.payload),
        )
        for start in range(0, len(whole.payload), size)
    ]


class Worker(Client):
    """What a scheduler and executors say to a store."""

    term = 0

    # --- batches ----------------------------------------------------------------------------

    async def batch(
        self, lines: int | Iterable[bytes], *, window_seconds: int = DAY_SECONDS
    ) -> str:
        """Upload an input, create a batch over it, and let it be validated; return its id."""
        if isinstance(lines, int):
            lines = [chat_line(f"r{number}") for number in range(lines)]
        file = await self.upload(b"".join(lines))
        batch = await self.create(file.id, window_seconds=window_seconds)
        await self.validated(batch.id)
        return batch.id

    async def validated(self, batch_id: str) -> None:
        """Wait until a batch runs."""
        await self.settled(batch_id, batches_pb2.BATCH_STATUS_IN_PROGRESS)

    async def cancel(self, batch_id: str) -> batches_pb2.Batch:
        with our_errors():
            answer = await self.batches.CancelBatch(
                batches_pb2.CancelBatchRequest(batch_id=batch_id), metadata=self.metadata
            )
        return answer.batch

    async def end_files(self, batch_id: str) -> tuple[list[Any], list[Any]]:
        """Return the parsed lines of output and error file; missing files are empty."""
        batch = await self.get(batch_id)
        found = []
        for kind in ("output_file_id", "error_file_id"):
            lines: list[Any] = []
            if batch.HasField(kind):
                content = await self.download(getattr(batch, kind))
                assert content.endswith(b"\n")
                lines = [orjson.loads(line) for line in content.splitlines()]
                assert lines
            found.append(lines)
        return found[0], found[1]

    # --- scheduler ----------------------------------------------------------------------------

    async def lead(
        self, holder: str = "scheduler-0", ttl_ms: int = TTL_MS
    ) -> work_pb2.LeadResponse:
        with our_errors():
            answer = await self.work.Lead(
                work_pb2.LeadRequest(holder=holder, ttl_ms=ttl_ms), metadata=self.metadata
            )
        if answer.leader:
            self.term = answer.term
        return answer

    async def window(self, limit: int = 0) -> work_pb2.GetWindowResponse:
        with our_errors():
            return await self.work.GetWindow(
                work_pb2.GetWindowRequest(term=self.term, batches_per_pool=limit),
                metadata=self.metadata,
            )

    async def cut(
        self, *cuts: tuple[str, int] | tuple[str, int, int]
    ) -> list[dispatch_pb2.Dispatch]:
        """Cut chunks: (batch, most lines[, most bytes]) each."""
        await self.lead()
        wanted = [
            work_pb2.Cut(batch_id=cut[0], max_lines=cut[1], max_bytes=(*cut, 1 << 30)[2])
            for cut in cuts
        ]
        with our_errors():
            answer = await self.work.CutChunks(
                work_pb2.CutChunksRequest(term=self.term, cuts=wanted), metadata=self.metadata
            )
        return list(answer.dispatches)

    async def reclaim(
        self, pending: Mapping[str, int] | None = None
    ) -> list[dispatch_pb2.Dispatch]:
        await self.lead()
        queues = {POOL: 0} if pending is None else pending
        with our_errors():
            answer = await self.work.ReclaimChunks(
                work_pb2.ReclaimChunksRequest(
                    term=self.term,
                    queues=[
                        work_pb2.PoolQueue(pool_id=pool, pending=waiting)
                        for pool, waiting in queues.items()
                    ],
                ),
                metadata=self.metadata,
            )
        return list(answer.dispatches)

    # --- executors ------------------------------------------------------------------------------

    async def register(self, executor: str = "e0", incarnation: str = "i0") -> None:
        with our_errors():
            await self.work.RegisterExecutor(
                work_pb2.RegisterExecutorRequest(
                    executor_id=executor,
                    incarnation=incarnation,
                    pool_id=POOL,
                    models=["simulated"],
                    endpoints=["/v1/chat/completions"],
                ),
                metadata=self.metadata,
            )

    async def deliver(
        self,
        dispatch: dispatch_pb2.Dispatch,
        executor: str = "e0",
        *,
        incarnation: str = "i0",
        delivered: int = 1,
    ) -> work_pb2.OpenAttemptResponse:
        """Tell the store of a delivery; the answer is one of three."""
        with our_errors():
            return await self.work.OpenAttempt(
                work_pb2.OpenAttemptRequest(
                    chunk_id=dispatch.chunk_id,
                    dispatch=dispatch.dispatch,
                    num_delivered=delivered,
                    executor_id=executor,
                    incarnation=incarnation,
                ),
                metadata=self.metadata,
            )

    async def open(
        self, dispatch: dispatch_pb2.Dispatch, executor: str = "e0", **more: Any
    ) -> work_pb2.AttemptOpened:
        """Open an attempt that must open."""
        answer = await self.deliver(dispatch, executor, **more)
        assert answer.WhichOneof("outcome") == "opened", answer
        return answer.opened

    async def lines(self, token: str, ranges: Iterable[Range]) -> dict[int, bytes]:
        """Read lines; checks that frames are bounded and whole."""
        answers = self.work.ReadLines(
            work_pb2.ReadLinesRequest(token=token, lines=messages(ranges)),
            metadata=self.metadata,
        )
        records, data = [], bytearray()
        with our_errors():
            async for answer in answers:
                assert len(answer.payload) <= FRAME_BYTES
                records.append(np.frombuffer(answer.records, LINE_RECORD))
                data += answer.payload
        found = {}
        at = 0
        for line, length in np.concatenate(records).tolist():
            found[line] = bytes(data[at : at + length])
            at += length
        assert at == len(data)
        return found

    async def append(
        self, *frames: work_pb2.AppendResultsRequest
    ) -> list[work_pb2.AppendResultsResponse]:
        """Send frames in one stream and return their acknowledgements."""
        with our_errors():
            call = self.work.AppendResults(iter(frames), metadata=self.metadata)
            return [answer async for answer in all_told(call)]

    async def finish(self, token: str, lines: Iterable[int], batch_id: str, **more: Any) -> int:
        """Append good results of these lines in one frame; return how many were accepted."""
        (answer,) = await self.append(frame(token, batch_id, list(lines), **more))
        return answer.accepted

    async def beat(
        self, started: Mapping[str, Iterable[Range]], executor: str = "e0"
    ) -> dict[str, int]:
        """Beat for these attempts; return the drops by token."""
        with our_errors():
            answer = await self.work.Beat(
                work_pb2.BeatRequest(executor_id=executor, attempts=beats(started)),
                metadata=self.metadata,
            )
        return {drop.token: drop.reason for drop in answer.drops}

    async def hand_back(self, *tokens: str, executor: str = "e0", trouble: str = "") -> None:
        with our_errors():
            await self.work.HandBack(
                work_pb2.HandBackRequest(executor_id=executor, tokens=tokens, trouble=trouble),
                metadata=self.metadata,
            )

    async def died(
        self,
        started: Mapping[str, Iterable[Range]],
        executor: str = "e0",
        *,
        complete: bool = False,
        start_ms: int = 0,
    ) -> None:
        with our_errors():
            await self.work.ReportDeath(
                work_pb2.ReportDeathRequest(
                    executor_id=executor,
                    attempts=beats(started),
                    complete=complete,
                    start_ms=start_ms,
                ),
                metadata=self.metadata,
            )


def messages(ranges: Iterable[Range]) -> list[common_pb2.LineRange]:
    return [common_pb2.LineRange(first=first, count=count) for first, count in ranges]


def beats(started: Mapping[str, Iterable[Range]]) -> list[work_pb2.AttemptBeat]:
    return [
        work_pb2.AttemptBeat(token=token, started=messages(ranges))
        for token, ranges in started.items()
    ]


def ranges_of(lines: Iterable[common_pb2.LineRange]) -> list[Range]:
    return [(each.first, each.count) for each in lines]


def result(batch_id: str, line: int, *, status: int = 200, answer: str = "ok") -> bytes:
    """Return the result line of a request whose custom id is `r` and its ordinal."""
    body = orjson.dumps({"answer": answer})
    return success_or_error_line(batch_id, line, f'"r{line}"'.encode(), status, body, "req_1")


def frame(
    token: str,
    batch_id: str,
    lines: Sequence[int],
    *,
    number: int = 1,
    failed: Iterable[int] = (),
    tokens: int = 3,
    answer: str = "ok",
) -> work_pb2.AppendResultsRequest:
    """Return a frame with a result for each line, 500 for those that failed."""
    bad = set(failed)
    texts = [
        result(batch_id, line, status=500 if line in bad else 200, answer=answer) for line in lines
    ]
    records = np.zeros(len(lines), RESULT_RECORD)
    lengths = np.array([len(text) for text in texts])
    records["line"] = lines
    records["length"] = lengths
    records["offset"] = np.cumsum(lengths) - lengths
    records["flags"] = [FAILED_FLAG if line in bad else 0 for line in lines]
    records["input_tokens"] = tokens
    records["output_tokens"] = 2 * tokens
    return work_pb2.AppendResultsRequest(
        token=token, frame=number, records=records.tobytes(), payload=b"".join(texts)
    )
