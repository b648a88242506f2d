"""A Hypothesis machine that does anything to stores, in any order, and knows what they must say."""

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import orjson
import sqlalchemy as sa
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protos.nightshift.v1 import batches_pb2, common_pb2, files_pb2
from services.kit.errors import UnavailableError
from services.store.domain.state import TIMESTAMP_COLUMN, BatchStatus
from services.store.models import batches as batch_rows
from tests.integration.store_work.crashing import Fleet, Gate, Ground, Member
from tests.integration.store_work.ops import Check, Op, Ops, status_of
from tests.kit import data_at_rest
from tests.kit.store_model import Batch

DAY_SECONDS = 25 * 3_600.0
"""Longer than what was announced waits for its content."""
_MOST_BATCHES = 4
_MOST_FROZEN = 3
_TERMINAL = ("completed", "failed", "expired", "cancelled")
_CODES = {BatchStatus.CANCELLED: "batch_cancelled", BatchStatus.EXPIRED: "batch_expired"}

PICK = st.sampled_from([0, 0, 0, 1, 2, 5])
STORE = st.integers(0, 1)
EXECUTOR = st.sampled_from(["e0", "e1"])
#: What befalls an op: nothing, mostly; or one of its places, by number.
FATE = st.sampled_from(
    [("", 0)] * 12 + [(kind, number) for kind in ("crash", "freeze") for number in range(8)]
)
Fate = tuple[str, int]


@dataclass
class Frozen:
    """An op that stands still."""

    op: Op
    member: Member
    gate: Gate
    task: "asyncio.Task[Any]"
    #: There where it is committed already.
    check: Check | None
    since_ms: int


class StoreMachine(RuleBasedStateMachine):
    """Stores and their model, side by side. Subclasses say where stores keep what they share."""

    ground: ClassVar[Ground]
    runner: ClassVar[asyncio.Runner]

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory(prefix="nightshift-machine-")
        self.fleet = self.run(self._open())
        self.ops = Ops(self.fleet)
        self.ops.sealed_rows = lambda: self.rows(batch_rows.c.sealed_ms.is_not(None))
        self.ops.ended_rows = lambda: self.rows(batch_rows.c.status.in_(_TERMINAL))
        self.model = self.ops.model
        self.frozen: list[Frozen] = []
        self.engines_die = False
        self.sound = True
        self.looks = itertools.count()
        self.proven: set[str] = set()

    async def _open(self) -> Fleet:
        fleet = Fleet(self.ground, Path(self.place.name) / "data")
        await fleet.start()
        return fleet

    def run(self, work: Any) -> Any:
        """Wait for some work."""

        async def answer() -> Any:
            return await work

        return self.runner.run(answer())

    def rows(self, where: sa.ColumnElement[bool]) -> set[str]:
        """Ids of batches that no door tells."""
        store = self.fleet.members[0].store
        return {row.id for row in self.run(store.sql(sa.select(batch_rows.c.id).where(where)))}

    # --- how an op is done --------------------------------------------------------------------

    def do(self, op: Op, which: int, fate: Fate = ("", 0)) -> None:
        """Do an op, with what befalls it."""
        with self._judged():
            self._do(op, which, fate)

    @contextlib.contextmanager
    def _judged(self) -> Iterator[None]:
        """Where something was wrong, nothing is right at the end."""
        try:
            yield
        except BaseException:
            self.sound = False
            raise

    def _do(self, op: Op, which: int, fate: Fate) -> None:
        member = self.fleet.members[which % len(self.fleet.members)]
        kind, number = fate
        if op.is_loop and any(each.op.is_loop and each.member is member for each in self.frozen):
            # A store's loops take one turn at a time.
            return
        if not kind or not op.places or (kind == "freeze" and len(self.frozen) >= _MOST_FROZEN):
            self._finish(op, member, self.run(op.on(member)))
        elif kind == "crash":
            self._crash_in(op, member, op.places[number % len(op.places)])
        else:
            self._freeze_in(op, member, op.places[number % len(op.places)])

    def _finish(self, op: Op, member: Member, answer: Any, check: Check | None = None) -> None:
        (check or op.decide(member.moment()))(answer)

    def _crash_in(self, op: Op, member: Member, place: str) -> None:
        plan = member.plan
        plan.crash_at(place)
        answer = self.run(_until(op.on(member), plan.died))
        plan.disarm()
        if not plan.died.is_set():
            self._finish(op, member, answer)
            return
        if place in op.on_freeze:
            op.on_freeze[place](member.moment())
        if place == op.places[-1] and not op.again:
            op.decide(member.moment())
        self._restart(member)
        if op.again:
            self._finish(op, member, self.run(op.on(member)))

    def _freeze_in(self, op: Op, member: Member, place: str) -> None:
        gate = member.plan.freeze_at(place)

        async def begin() -> "asyncio.Task[Any]":
            task = asyncio.create_task(op.on(member))
            reached = asyncio.create_task(gate.reached.wait())
            await asyncio.wait({task, reached}, return_when=asyncio.FIRST_COMPLETED)
            reached.cancel()
            return task

        task = self.run(begin())
        member.plan.disarm()
        if not gate.reached.is_set():
            self._finish(op, member, task.result())
            return
        if place in op.on_freeze:
            op.on_freeze[place](member.moment())
        decided = place == op.places[-1] and not op.is_loop
        check = op.decide(member.moment()) if decided else None
        self.frozen.append(Frozen(op, member, gate, task, check, self.fleet.now_ms()))

    def _thaw(self, frozen: Frozen) -> None:
        frozen.gate.open.set()
        answer = self.run(frozen.task)
        waited_ms = self.fleet.now_ms() - frozen.since_ms
        if isinstance(answer, UnavailableError) and waited_ms >= 24 * 3_600_000:
            # What it had announced was given up meanwhile: the client is told to try again.
            assert frozen.check is None
            return
        self._finish(frozen.op, frozen.member, answer, frozen.check)

    def _restart(self, member: Member) -> None:
        for each in [each for each in self.frozen if each.member is member]:
            self.frozen.remove(each)
            self.run(_stop(each.task))
        self.run(member.crash())

    # --- users --------------------------------------------------------------------------------

    @initialize(engines_die=st.booleans())
    def begin(self, engines_die: bool) -> None:
        self.engines_die = engines_die

    @precondition(lambda self: len(self.model.batches) < _MOST_BATCHES)
    @rule(
        lines=st.sampled_from([2, 5, 9, 1]),
        seconds=st.sampled_from([120, 20, 10_000]),
        far=st.sampled_from([3, 3, 3, 2, 1, 0]),
        which=STORE,
        fate=FATE,
    )
    def create(self, lines: int, seconds: int, far: int, which: int, fate: Fate) -> None:
        """Begin a batch, and go on with it for some steps."""
        before = set(self.model.files)
        self.do(self.ops.upload(lines), which, fate if fate[0] == "crash" else ("", 0))
        (file_id,) = set(self.model.files) - before
        self.do(self.ops.create(file_id, lines, seconds), which, fate)
        batch = self.model.batches[-1] if self.model.batches else None
        if batch is None or batch.file_id != file_id or not batch.id:
            return
        if far > 0:
            self.do(self.ops.validate(), which)
        if far > 1:
            self.do(self.ops.cut(batch, 5), which)
        if far > 2 and self.ops.messages:
            self.do(self.ops.deliver(self.ops.messages[-1], "e0", 1), which)

    @precondition(lambda self: self.known())
    @rule(pick=PICK, sure=st.sampled_from([True, False, False]), which=STORE, fate=FATE)
    def cancel(self, pick: int, sure: bool, which: int, fate: Fate) -> None:
        if sure:
            self.do(self.ops.cancel(self.batch(pick)), which, fate)

    @precondition(lambda self: self.model.files)
    @rule(pick=PICK, which=STORE, fate=FATE)
    def delete_input(self, pick: int, which: int, fate: Fate) -> None:
        files = list(self.model.files)
        self.do(self.ops.delete(files[pick % len(files)]), which, fate)

    # --- scheduler and executors --------------------------------------------------------------

    @precondition(lambda self: self.known())
    @rule(pick=PICK, most=st.sampled_from([1, 3, 9]), which=STORE, fate=FATE)
    def cut(self, pick: int, most: int, which: int, fate: Fate) -> None:
        self.do(self.ops.cut(self.batch(pick), most), which, fate)

    @precondition(lambda self: self.known())
    @rule(which=STORE, fate=FATE)
    def reclaim(self, which: int, fate: Fate) -> None:
        self.do(self.ops.reclaim(), which, fate)

    @precondition(lambda self: self.ops.messages)
    @rule(pick=PICK, executor=EXECUTOR, again=st.booleans(), which=STORE, fate=FATE)
    def deliver(self, pick: int, executor: str, again: bool, which: int, fate: Fate) -> None:
        messages = self.ops.messages[::-1]
        message = messages[pick % len(messages)]
        self.do(self.ops.deliver(message, executor, 2 if again else 1), which, fate)

    @precondition(lambda self: self.ops.attempts)
    @rule(
        pick=PICK,
        some=st.lists(st.integers(0, 8), max_size=4),
        failed=st.booleans(),
        big=st.booleans(),
        which=STORE,
        fate=FATE,
    )
    def append(
        self, pick: int, some: list[int], failed: bool, big: bool, which: int, fate: Fate
    ) -> None:
        attempt = self.attempt(pick)
        lines = sorted(attempt.lines)
        # Nothing picked is all.
        chosen = [lines[each % len(lines)] for each in some] or lines
        self.do(self.ops.append(attempt, chosen[:2] if big else chosen, failed, big), which, fate)

    @precondition(lambda self: self.ops.attempts)
    @rule(picks=st.lists(PICK, min_size=1, max_size=3), which=STORE, fate=FATE)
    def beat(self, picks: list[int], which: int, fate: Fate) -> None:
        attempts = list({pick.token: pick for pick in map(self.attempt, picks)}.values())
        self.do(self.ops.beat(attempts, started=self.engines_die), which, fate)

    @precondition(lambda self: self.ops.attempts)
    @rule(pick=PICK, executor=EXECUTOR, which=STORE, fate=FATE)
    def hand_back(self, pick: int, executor: str, which: int, fate: Fate) -> None:
        self.do(self.ops.hand_back(self.attempt(pick), executor), which, fate)

    @precondition(lambda self: self.ops.attempts)
    @rule(pick=PICK, restarts=st.booleans(), which=STORE, fate=FATE)
    def die(self, pick: int, restarts: bool, which: int, fate: Fate) -> None:
        attempt = self.attempt(pick)
        if restarts:
            op = self.ops.restart_executor(attempt.delivery.executor)
        else:
            op = self.ops.die(attempt, started=self.engines_die)
        self.do(op, which, fate)

    # --- stores -------------------------------------------------------------------------------

    @rule(
        kind=st.sampled_from(["end", "finalize", "validate", "end", "finalize", "sweep"]),
        which=STORE,
        fate=FATE,
    )
    def take_turn(self, kind: str, which: int, fate: Fate) -> None:
        self.do(getattr(self.ops, kind)(), which, fate)

    @rule(which=STORE)
    def crash(self, which: int) -> None:
        self._restart(self.fleet.members[which % len(self.fleet.members)])

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 6.0, 16.0]))
    def wait(self, seconds: float) -> None:
        self.fleet.clock.advance(seconds)

    @precondition(lambda self: self.frozen and self.model.batches)
    @rule(sweeps=st.sampled_from([False, False, False, True]), which=STORE)
    def wait_for_the_sweeper(self, sweeps: bool, which: int) -> None:
        if sweeps:
            self.fleet.clock.advance(DAY_SECONDS)
            self.do(self.ops.sweep(), which)

    @precondition(lambda self: self.frozen)
    @rule(pick=PICK)
    def thaw(self, pick: int) -> None:
        self._thaw(self.frozen.pop(pick % len(self.frozen)))

    def known(self) -> list[Batch]:
        """Batches whose creation was answered."""
        return [batch for batch in self.model.batches if batch.id]

    def batch(self, pick: int) -> Batch:
        """One of them, the youngest first."""
        found = self.known()[::-1]
        return found[pick % len(found)]

    def attempt(self, pick: int) -> Any:
        """One of the attempts, the youngest first."""
        found = self.ops.attempts[::-1]
        return found[pick % len(found)]

    # --- what must be true --------------------------------------------------------------------

    @invariant()
    def every_batch_is_as_the_model_has_it(self) -> None:
        with self._judged():
            self._look()

    def _look(self) -> None:
        members = self.fleet.members
        store = members[next(self.looks) % len(members)].store
        for batch in self.known():
            shown = self.run(store.get(batch.id))
            assert status_of(shown) is batch.status, (shown, batch)
            total, completed, failed = batch.counts
            assert shown.request_counts == batches_pb2.RequestCounts(
                total=total, completed=completed, failed=failed
            )
            done = completed + failed
            assert shown.usage == common_pb2.Usage(input_tokens=3 * done, output_tokens=6 * done)
            times = [getattr(shown, TIMESTAMP_COLUMN[status]) for status in batch.path]
            assert all(times), shown
            assert times == sorted(times), shown
            if batch.ended and batch.id not in self.proven:
                self.proven.add(batch.id)
                self._prove(batch, shown)

    def _prove(self, batch: Batch, shown: batches_pb2.Batch) -> None:
        """Hold the end files of a batch against the model."""
        store = self.fleet.members[0].store
        wanted = batch.end_files()
        code = _CODES.get(batch.outcome) if batch.outcome else None
        for kind, lines in zip(("output_file_id", "error_file_id"), wanted, strict=True):
            assert shown.HasField(kind) == bool(lines), (kind, shown, lines)
            if not lines:
                continue
            content = self.run(store.download(getattr(shown, kind)))
            found = [orjson.loads(line) for line in content.splitlines()]
            assert [(int(line["custom_id"][1:]), _answer_of(line, code)) for line in found] == lines

    def teardown(self) -> None:
        """Bring everything to its end; then nothing may be left over."""
        try:
            if self.sound:
                self._come_to_an_end()
        finally:
            for frozen in self.frozen:
                self.run(_stop(frozen.task))
            self.run(self.fleet.stop())
            self.place.cleanup()

    def _come_to_an_end(self) -> None:
        while self.frozen:
            self._thaw(self.frozen.pop())
        self.fleet.clock.advance(10_200)
        for seconds in (2.0, 70.0, 0.0):
            for op in (self.ops.validate, self.ops.end, self.ops.finalize):
                self.do(op(), 0)
            self.fleet.clock.advance(seconds)
        self._look()
        assert all(batch.ended for batch in self.model.batches)
        self._nothing_is_left_over()

    def _nothing_is_left_over(self) -> None:
        store = self.fleet.members[0].store
        listed = self.run(
            store.batches.ListBatches(
                batches_pb2.ListBatchesRequest(page=common_pb2.PageRequest(limit=100)),
                metadata=store.metadata,
            )
        )
        assert len(listed.batches) == len(self.model.batches), "made twice"
        files = self.run(
            store.files.ListFiles(
                files_pb2.ListFilesRequest(purpose="batch"), metadata=store.metadata
            )
        )
        assert {file.id for file in files.files} == self.model.files.keys()
        self.fleet.clock.advance(DAY_SECONDS)
        for _ in range(2):
            self.do(self.ops.sweep(), 0)
        ends = sum(bool(part) for each in self.model.batches for part in each.end_files())
        blobs = [path for path in (self.fleet.folder / "blobs").rglob("*") if path.is_file()]
        # An input has a line index beside it.
        assert len(blobs) == ends + 2 * len(self.model.files), blobs
        self._check_at_rest()

    def _check_at_rest(self) -> None:
        found = data_at_rest.check(self.fleet.folder, deep=True)
        assert not found.faults, found.faults


def _answer_of(line: dict[str, Any], code: str | None) -> str | None:
    if line["response"] is None:
        assert line["error"]["code"] == code, line
        return None
    answer: str = line["response"]["body"]["answer"]
    return answer


async def _until(work: Any, over: asyncio.Event) -> Any:
    """Return the answer, or None where the store dies first."""
    task = asyncio.ensure_future(work)
    death = asyncio.create_task(over.wait())
    await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
    death.cancel()
    if over.is_set():
        await _stop(task)
        return None
    return task.result()


async def _stop(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
