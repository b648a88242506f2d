"""What a test does to a store, as values: how to do it, and what the model says of it.

An op may be done at once, or die or stand still at one of its places. Its last step decides: where
that is committed the op has happened, answered or not.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos.nightshift.v1 import batches_pb2, dispatch_pb2, files_pb2, work_pb2
from services.kit.calls import rpc
from services.kit.wire.errors import (
    ConflictError,
    InternalError,
    NightshiftError,
    NotFoundError,
    UnavailableError,
)
from services.store.domain.state import BatchStatus
from tests.integration.store_work.crashing import Fleet, Member
from tests.integration.store_work.harness import Store
from tests.integration.store_work.worker import frame, ranges_of
from tests.kit.store import chat_line, our_errors
from tests.kit.store_model import Model
from tests.kit.store_model_parts import Attempt, Batch, Chunk, Delivery, Moment, Outcome

Check = Callable[[Any], None]
BIG = "x" * 270_000
"""An answer that is too large for its row."""


@dataclass(frozen=True)
class Op:
    """One thing to do.

    Attributes:
        steps: the writes that it passes, in order.
        decide: applies it to the model now; returns what checks the answer.
        on_freeze: applies what is done already where it stands still at this place.
        again: it is done again after a crash: a client's retry, a loop's next turn.
    """

    call: Callable[[Store], Awaitable[Any]]
    steps: tuple[str, ...]
    decide: Callable[[Moment], Check]
    on_freeze: Mapping[str, Callable[[Moment], None]] = field(default_factory=dict)
    again: bool = False
    is_loop: bool = False

    @property
    def places(self) -> list[str]:
        """Where it may die or stand still."""
        return [f"{step}:{when}" for step in self.steps for when in ("before", "after")]

    async def on(self, member: Member) -> Any:
        """Do it; a refusal is an answer too."""
        try:
            with our_errors():
                return await self.call(member.store)
        except InternalError:
            raise
        except NightshiftError as refusal:
            raised = refusal.__cause__
            if (
                isinstance(raised, grpc.aio.AioRpcError)
                and not raised.trailing_metadata()
                and not member.plan.died.is_set()
            ):
                # The store's own words are an answer; that it was not reached is none.
                raise raised from None
            return refusal


class Ops:
    """Makes ops for one model and one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.model = Model()
        self.messages: list[tuple[Chunk, int]] = []
        self.attempts: list[Attempt] = []
        self.keys = 0
        self.incarnations = {"e0": "i0", "e1": "i0"}

    def now_ms(self) -> int:
        """The stores' time."""
        return self.fleet.now_ms()

    #: Chunk and delivery of each open attempt, where no door tells; set by the machine.
    open_rows: Callable[[], set[tuple[str, Delivery]]]

    # --- users --------------------------------------------------------------------------------

    def upload(self, lines: int) -> Op:
        """A file, under a key."""
        self.keys += 1
        key = f"file-{self.keys}"
        content = b"".join(chat_line(f"r{line}", key) for line in range(lines))

        def frames() -> Any:
            yield files_pb2.UploadFileRequest(header=files_pb2.UploadFileHeader(filename=key))
            yield files_pb2.UploadFileRequest(data=content)
            yield files_pb2.UploadFileRequest(footer=files_pb2.UploadFileFooter(purpose="batch"))

        async def call(store: Store) -> files_pb2.File:
            answer = await store.files.UploadFile(frames(), metadata=_keyed(store, key))
            return answer.file

        def check(answer: Any) -> None:
            self.model.files[answer.id] = content

        steps = ("blob.announce", "file.write", "file.index_write", "file.create")
        return Op(call, steps, lambda _at: check, again=True)

    def create(self, file_id: str, lines: int, window_seconds: int) -> Op:
        """A batch, under a key."""
        self.keys += 1
        made = Batch(lines, self.now_ms() + window_seconds * 1000, file_id, f"batch-{self.keys}")

        async def call(store: Store) -> batches_pb2.Batch:
            answer = await store.batches.CreateBatch(
                batches_pb2.CreateBatchRequest(
                    input_file_id=file_id,
                    endpoint="/v1/chat/completions",
                    completion_window="24h",
                    completion_window_seconds=window_seconds,
                ),
                metadata=_keyed(store, made.key),
            )
            return answer.batch

        def decide(at: Moment) -> Check:
            if made not in self.model.batches:
                self.model.batches.append(made)

            def check(answer: Any) -> None:
                assert made.id in ("", answer.id), "made twice under one key"
                made.id = answer.id

            return check

        return Op(call, ("batch.create",), decide, again=True)

    def cancel(self, batch: Batch) -> Op:
        """Cancel a batch."""

        def decide(at: Moment) -> Check:
            possible = self.model.cancel(batch, at)
            # What is shown may be a moment younger, where it stood still before its answer.
            since = len(batch.path) - 1

            def check(answer: Any) -> None:
                if possible:
                    assert status_of(answer) in batch.path[since:], answer
                else:
                    assert isinstance(answer, ConflictError), answer

            return check

        return Op(lambda store: store.cancel(batch.id), ("batch.cancel",), decide)

    def delete(self, file_id: str) -> Op:
        """Delete a file; its batch goes on."""

        async def call(store: Store) -> Any:
            request = files_pb2.DeleteFileRequest(file_id=file_id)
            return await store.files.DeleteFile(request, metadata=store.metadata)

        def decide(at: Moment) -> Check:
            known = self.model.files.pop(file_id, None)

            def check(answer: Any) -> None:
                assert isinstance(answer, NotFoundError) == (known is None), answer

            return check

        return Op(call, ("file.delete",), decide)

    # --- scheduler ----------------------------------------------------------------------------

    def cut(self, batch: Batch, most: int) -> Op:
        """Cut a chunk."""

        def decide(at: Moment) -> Check:
            made = self.model.make_chunk(batch, most, at)

            def check(answer: Any) -> None:
                if made is None:
                    assert answer == [], answer
                    return
                (told,) = answer
                assert told.dispatch == 1
                self._heard(told, made)

            return check

        return Op(lambda store: store.cut((batch.id, most)), ("chunk.cut",), decide)

    def reclaim(self) -> Op:
        """Find what has no live lease."""

        def decide(at: Moment) -> Check:
            raised = [(chunk, chunk.dispatch) for chunk in self.model.reclaim(at)]

            def check(answer: list[dispatch_pb2.Dispatch]) -> None:
                found = [(self.model.chunk_of(told), told) for told in answer]
                sure = [(each, told) for each, told in found if not each.batch.shaken]
                assert [(each, told.dispatch) for each, told in sure] == raised
                for chunk, told in found:
                    self._heard(told, chunk)

            return check

        return Op(lambda store: store.reclaim(), ("chunk.reclaim",), decide)

    def _heard(self, told: dispatch_pb2.Dispatch, chunk: Chunk) -> None:
        lines = lines_of(told.lines)
        if chunk.batch.shaken:
            chunk.dispatch = max(chunk.dispatch, told.dispatch)
        else:
            assert chunk.lines <= lines <= chunk.lines | chunk.batch.first.keys()
        chunk.id = told.chunk_id
        self.messages.append((chunk, told.dispatch))

    # --- executors ----------------------------------------------------------------------------

    def deliver(self, message: tuple[Chunk, int], executor: str, number: int) -> Op:
        """A message reaches an executor."""
        chunk, dispatch = message
        delivery = Delivery(dispatch, executor, self.incarnations[executor], number)

        async def call(store: Store) -> work_pb2.OpenAttemptResponse:
            told = dispatch_pb2.Dispatch(chunk_id=chunk.id, dispatch=dispatch)
            more = {"incarnation": delivery.incarnation, "delivered": number}
            return await store.deliver(told, executor, **more)

        def decide(at: Moment) -> Check:
            known = not chunk.batch.shaken
            expected = self.model.open(chunk, delivery, at) if known else ""
            if chunk.batch.shaken:
                return self._opens_somehow(chunk, delivery, at)
            left = set(chunk.left)

            def check(answer: work_pb2.OpenAttemptResponse) -> None:
                outcome = answer.WhichOneof("outcome")
                if isinstance(expected, str):
                    assert outcome == expected, answer
                    return
                assert outcome == "opened", answer
                assert lines_of(answer.opened.lines) == left
                assert expected.token in ("", answer.opened.token)
                expected.token = answer.opened.token
                if expected not in self.attempts:
                    self.attempts.append(expected)

            return check

        return Op(call, ("attempt.open",), decide)

    def _opens_somehow(self, chunk: Chunk, delivery: Delivery, at: Moment) -> Check:
        """Of a batch that is shaken: nothing that is done or over is run again."""
        self.model.lose_closed(self.open_rows())
        batch = chunk.batch
        runs = batch.runs(at.now_ms)
        left = set(range(batch.cut)) - batch.first.keys()

        def check(answer: work_pb2.OpenAttemptResponse) -> None:
            if answer.WhichOneof("outcome") != "opened":
                return
            lines = lines_of(answer.opened.lines)
            assert runs
            assert lines
            assert lines <= left
            attempt = Attempt(chunk, delivery, 0, 0, lines, token=answer.opened.token)
            self.attempts.append(attempt)

        return check

    def append(self, attempt: Attempt, lines: list[int], failed: bool, big: bool) -> Op:
        """Results, each line named as often as it stands in `lines`."""
        batch = attempt.chunk.batch
        self.keys += 1
        answer_text = f"{BIG if big else ''}{self.keys}"
        bad = set(lines[:1]) if failed else set()
        results = [(line, Outcome(line in bad, answer_text)) for line in lines]

        async def call(store: Store) -> work_pb2.AppendResultsResponse:
            (answer,) = await store.append(
                frame(attempt.token, batch.id, lines, failed=bad, answer=answer_text)
            )
            return answer

        def decide(at: Moment) -> Check:
            accepted = self.model.append(attempt, results, at)

            def check(answer: Any) -> None:
                told = (answer.sealed, answer.accepted)
                assert told == (accepted is None, accepted or 0), answer

            return check

        steps = ("result.announce", "result.write") if big else ()
        return Op(call, (*steps, "result.record"), decide)

    def beat(self, attempts: list[Attempt], *, started: bool) -> Op:
        """Beat for attempts, whose lines are in the engine or not."""
        told = {
            each.token: [(line, 1) for line in sorted(each.lines) if started] for each in attempts
        }

        def decide(at: Moment) -> Check:
            expected: dict[str, set[int]] = {}
            for each in attempts:
                each.chunk.batch.shaken |= started
                reasons = self.model.beat(each, at)
                if not each.chunk.batch.shaken:
                    expected[each.token] = reasons

            def check(answer: dict[str, int]) -> None:
                for token, reasons in expected.items():
                    assert (token in answer) == bool(reasons), (answer, expected)
                    assert not reasons or answer[token] in reasons, (answer, expected)

            return check

        return Op(lambda store: store.beat(told), ("attempt.beat",), decide)

    def hand_back(self, attempt: Attempt, executor: str) -> Op:
        """Give an attempt up; another executor's is left alone."""

        def decide(at: Moment) -> Check:
            self.model.hand_back(attempt, executor)
            return any_answer

        return Op(
            lambda store: store.hand_back(attempt.token, executor=executor),
            ("attempt.hand_back",),
            decide,
        )

    def die(self, attempt: Attempt, *, started: bool) -> Op:
        """Its engine dies, with its lines in it or not."""
        executor = attempt.delivery.executor
        lines = [(line, 1) for line in sorted(attempt.lines)] if started else []

        def decide(at: Moment) -> Check:
            attempt.chunk.batch.shaken |= started
            self.model.lose([attempt], seen=True)
            return any_answer

        return Op(
            lambda store: store.died({attempt.token: lines}, executor),
            ("executor.death",),
            decide,
        )

    def restart_executor(self, executor: str) -> Op:
        """A new process of it: what the last one had is lost."""
        self.keys += 1
        incarnation = self.incarnations[executor] = f"i{self.keys:06}"

        def decide(at: Moment) -> Check:
            mine = [
                attempt
                for batch in self.model.batches
                for chunk in batch.chunks
                for attempt in chunk.attempts
                if attempt.delivery.executor == executor
                and attempt.delivery.incarnation != incarnation
            ]
            self.model.lose(mine, seen=False)
            return any_answer

        return Op(
            lambda store: store.register(executor, incarnation), ("executor.register",), decide
        )


def any_answer(_answer: Any) -> None:
    """Nothing is known of the answer but that there is one."""
    assert not isinstance(_answer, UnavailableError), _answer


def _keyed(store: Store, key: str) -> tuple[tuple[str, str], ...]:
    return (*store.metadata, (rpc.IDEMPOTENCY_KEY, key))


def lines_of(ranges: Any) -> set[int]:
    """The lines of range messages."""
    return {line for first, count in ranges_of(ranges) for line in range(first, first + count)}


def status_of(batch: batches_pb2.Batch) -> BatchStatus:
    """The status of a message."""
    name = batches_pb2.BatchStatus.Name(batch.status)
    return BatchStatus(name.removeprefix("BATCH_STATUS_").lower())
