"""A scripted store: a true gRPC server that serves `Work` to an executor and logs every call.

It knows chunks and results, in memory, and does what a test tells it to; it decides nothing that
the real store decides from SQL.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import orjson

from protos.nightshift.v1 import common_pb2, dispatch_pb2, work_pb2, work_pb2_grpc
from services.kit.calls import interceptors, rpc
from services.kit.wire.errors import NotFoundError
from services.kit.wire.frames import FRAME_BYTES, LINE_RECORD, RESULT_RECORD

SECRET = "s" * 64
ENDPOINT = "/v1/chat/completions"
PROJECT = "a-project"


@dataclass
class ScriptedChunk:
    """A chunk as the store would know it."""

    dispatch: dispatch_pb2.Dispatch
    lines: dict[int, bytes]
    deaths: int = 0
    attempts: int = 0
    results: dict[int, bytes] = field(default_factory=dict)
    records: dict[int, Any] = field(default_factory=dict)
    results_seen: int = 0
    """Result lines received, repeats included."""

    @property
    def done(self) -> bool:
        """Whether every line has a result."""
        return len(self.results) == len(self.lines)

    def answers(self) -> dict[str, Any]:
        """Return the decoded result lines by custom_id."""
        decoded = [orjson.loads(text) for text in self.results.values()]
        return {line["custom_id"]: line for line in decoded}


def chat_line(custom_id: str, text: str = "hello there", **body: Any) -> bytes:
    """Return an input line for the simulated engine; `x_simulate` and the like go in the body."""
    messages = [{"role": "user", "content": text}]
    return orjson.dumps(
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": ENDPOINT,
            "body": {"model": "m", "messages": messages, **body},
        }
    )


class ScriptedWork(work_pb2_grpc.WorkServicer):
    """The calls that an executor makes."""

    def __init__(self) -> None:
        self.chunks: dict[str, ScriptedChunk] = {}
        self.tokens: dict[str, ScriptedChunk] = {}
        self.calls: list[tuple[str, Any]] = []
        self.traces: list[tuple[str, str]] = []
        """The `traceparent` of each call; empty when it had none."""
        self.drops: dict[str, int] = {}
        """Reason by token, told in the answer to the next beats."""
        self.sealed: set[str] = set()
        """Batches that take no results."""
        self.outcomes: dict[str, list[work_pb2.OpenAttemptResponse]] = {}
        """Answers to the next openings, by chunk, before the usual ones."""
        self.away = False
        """Every call answers UNAVAILABLE."""
        self.older = False
        """Like a store that says nothing of what a chunk's lines are to run as."""
        self.break_streams = 0
        """How many result streams to break after their first frame, unacknowledged."""
        self.acks = asyncio.Event()
        """Results are acknowledged while it is set."""
        self.acks.set()
        self.frames: list[work_pb2.AppendResultsRequest] = []
        self.refuse: Callable[[bytes], Exception | None] = lambda _payload: None
        """What the store raises at a frame with this payload."""
        self.spoilt_reads = 0
        """How many streams of lines to answer with bytes that are of no line."""

    def add_chunk(
        self,
        lines: Sequence[bytes],
        *,
        pool_id: str,
        batch_id: str = "batch_a",
        first: int = 0,
        alone: bool = False,
        deaths: int = 0,
    ) -> dispatch_pb2.Dispatch:
        """Make a chunk of `lines`; returns the message to publish."""
        dispatch = dispatch_pb2.Dispatch(
            version=1,
            batch_id=batch_id,
            chunk_id=f"chunk_{len(self.chunks):032x}",
            dispatch=1,
            pool_id=pool_id,
            lines=[common_pb2.LineRange(first=first, count=len(lines))],
            line_count=len(lines),
            input_bytes=sum(map(len, lines)),
            endpoint=ENDPOINT,
            model="m",
            alone=alone,
        )
        numbered = dict(enumerate(lines, first))
        self.chunks[dispatch.chunk_id] = ScriptedChunk(dispatch, numbered, deaths)
        return dispatch

    def named(self, call: str) -> list[Any]:
        """Return the requests of one kind of call, in order."""
        return [request for name, request in self.calls if name == call]

    async def _enter(self, name: str, request: Any, context: Any) -> None:
        if self.away:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        self.calls.append((name, request))
        self.traces.append((name, interceptors.metadata_value(context, "traceparent")))

    async def RegisterExecutor(self, request: Any, context: Any) -> Any:
        """Log it."""
        await self._enter("RegisterExecutor", request, context)
        return work_pb2.RegisterExecutorResponse(lease_ms=15_000)

    async def OpenAttempt(self, request: Any, context: Any) -> Any:
        """Open with all lines that have no result."""
        await self._enter("OpenAttempt", request, context)
        scripted = self.outcomes.get(request.chunk_id)
        if scripted:
            return scripted.pop(0)
        chunk = self.chunks[request.chunk_id]
        if chunk.done:
            return work_pb2.OpenAttemptResponse(gone=work_pb2.AttemptGone(reason="done"))
        chunk.attempts += 1
        token = f"{request.chunk_id}-{chunk.attempts}"
        self.tokens[token] = chunk
        left = [number for number in chunk.lines if number not in chunk.results]
        return work_pb2.OpenAttemptResponse(
            opened=work_pb2.AttemptOpened(
                token=token,
                attempt=chunk.attempts,
                lines=[common_pb2.LineRange(first=number, count=1) for number in left],
                deaths=chunk.deaths,
                project_id=PROJECT,
                **({} if self.older else _job(chunk.dispatch)),
            )
        )

    async def ReadLines(
        self, request: Any, context: Any
    ) -> AsyncIterator[work_pb2.ReadLinesResponse]:
        """Send the lines in frames, a long one in pieces."""
        await self._enter("ReadLines", request, context)
        if self.spoilt_reads:
            self.spoilt_reads -= 1
            yield work_pb2.ReadLinesResponse(payload=b"of no line")
            return
        chunk = self.tokens[request.token]
        numbers = [n for part in request.lines for n in range(part.first, part.first + part.count)]
        records, payload = [], b""
        for number in numbers:
            text = chunk.lines[number]
            records.append((number, len(text)))
            payload += text
            while len(payload) > FRAME_BYTES:
                yield _lines_frame(records, payload[:FRAME_BYTES])
                records, payload = [], payload[FRAME_BYTES:]
        if payload:
            yield _lines_frame(records, payload)

    async def AppendResults(
        self, requests: AsyncIterator[work_pb2.AppendResultsRequest], context: Any
    ) -> AsyncIterator[work_pb2.AppendResultsResponse]:
        """Take frames, first result of a line wins, and acknowledge them in order."""
        await self._enter("AppendResults", None, context)
        records, payload = b"", b""
        async for request in requests:
            self.frames.append(request)
            records, payload = records + request.records, payload + request.payload
            if request.more:
                continue
            if self.break_streams:
                self.break_streams -= 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
            await self.acks.wait()
            refusal = self.refuse(payload)
            if refusal is not None:
                raise refusal
            if request.token not in self.tokens:
                raise NotFoundError("no such attempt")
            chunk = self.tokens[request.token]
            sealed = chunk.dispatch.batch_id in self.sealed
            accepted = 0 if sealed else _take(chunk, records, payload)
            records, payload = b"", b""
            yield work_pb2.AppendResultsResponse(
                frame=request.frame, accepted=accepted, sealed=sealed
            )

    async def Beat(self, request: Any, context: Any) -> Any:
        """Name the attempts that the script drops."""
        await self._enter("Beat", request, context)
        drops = [
            work_pb2.AttemptDrop(token=one.token, reason=self.drops[one.token])
            for one in request.attempts
            if one.token in self.drops
        ]
        return work_pb2.BeatResponse(drops=drops)

    async def HandBack(self, request: Any, context: Any) -> Any:
        """Log it."""
        await self._enter("HandBack", request, context)
        return work_pb2.HandBackResponse()

    async def ReportDeath(self, request: Any, context: Any) -> Any:
        """Log it."""
        await self._enter("ReportDeath", request, context)
        return work_pb2.ReportDeathResponse()


def _job(dispatch: dispatch_pb2.Dispatch) -> dict[str, Any]:
    return {
        "endpoint": dispatch.endpoint,
        "model": dispatch.model,
        "expires_at_ms": dispatch.expires_at_ms,
        "alone": dispatch.alone,
        "batch_id": dispatch.batch_id,
    }


def _lines_frame(records: list[tuple[int, int]], payload: bytes) -> work_pb2.ReadLinesResponse:
    table = np.array(records, dtype=LINE_RECORD)
    return work_pb2.ReadLinesResponse(records=table.tobytes(), payload=payload)


def _take(chunk: ScriptedChunk, records: bytes, payload: bytes) -> int:
    accepted = 0
    for record in np.frombuffer(records, RESULT_RECORD):
        number, start = int(record["line"]), int(record["offset"])
        chunk.results_seen += 1
        if number not in chunk.results:
            chunk.results[number] = payload[start : start + int(record["length"])]
            chunk.records[number] = record
            accepted += 1
    return accepted


async def start_scripted_store(work: ScriptedWork, listen: str) -> rpc.RunningServer:
    """Serve `work` at `listen` as the store would: secret, errors, health."""
    return await rpc.start_server(
        listen,
        [rpc.ServiceEntry("nightshift.v1.Work", work, work_pb2_grpc.add_WorkServicer_to_server)],
        [interceptors.SecretInterceptor(SECRET), interceptors.ErrorsInterceptor()],
    )
