"""A Hypothesis machine that does anything to stores, in any order, and knows what they must say."""

import asyncio
import itertools
from typing import Any

import orjson
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from protos.nightshift.v1 import batches_pb2, common_pb2, files_pb2
from services.store.checkup import doctor
from services.store.domain.state import TIMESTAMP_COLUMN, BatchStatus
from services.store.settings import StoreSettings
from tests.integration.store_work.befalling import FATE, Befalling, Fate
from tests.integration.store_work.ops import status_of
from tests.kit.store_model_parts import Attempt, Batch

DAY_SECONDS = 25 * 3_600.0
"""Longer than what was announced waits for its content."""
_MOST_BATCHES = 4
_CODES = {BatchStatus.CANCELLED: "batch_cancelled", BatchStatus.EXPIRED: "batch_expired"}

PICK = st.sampled_from([0, 0, 0, 1, 2, 5])
STORE = st.integers(0, 1)
EXECUTOR = st.sampled_from(["e0", "e1"])


class StoreMachine(Befalling):
    """Rules, and what must be true after each."""

    def __init__(self) -> None:
        super().__init__()
        self.engines_die = False
        self.looks = itertools.count()
        # Where an upload and a sweep stand still at the end.
        self.last_upload = self.last_sweep = 0
        self.proven: set[str] = set()

    # --- users --------------------------------------------------------------------------------

    @initialize(
        engines_die=st.booleans(),
        lines=st.sampled_from([2, 5, 9]),
        which=STORE,
        last=st.tuples(st.integers(0, 7), st.integers(0, 5)),
    )
    def begin(self, engines_die: bool, lines: int, which: int, last: tuple[int, int]) -> None:
        self.engines_die = engines_die
        self.last_upload, self.last_sweep = last
        self.begin_batch(lines, 10_000, 3, which)

    @precondition(lambda self: len(self.model.batches) < _MOST_BATCHES)
    @rule(
        lines=st.sampled_from([2, 5, 9, 1]),
        seconds=st.sampled_from([120, 20, 10_000]),
        far=st.sampled_from([3, 3, 3, 2, 1, 0]),
        which=STORE,
        fate=FATE,
    )
    def create(self, lines: int, seconds: int, far: int, which: int, fate: Fate) -> None:
        self.begin_batch(lines, seconds, far, which, fate)

    def begin_batch(
        self, lines: int, seconds: int, far: int, which: int, fate: Fate = ("", 0)
    ) -> None:
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

    @rule(lines=st.sampled_from([1, 3]), which=STORE, fate=FATE)
    def upload(self, lines: int, which: int, fate: Fate) -> None:
        self.do(self.ops.upload(lines), which, fate)

    @precondition(lambda self: self.known())
    @rule(pick=PICK, sure=st.sampled_from([True, False, False]), which=STORE, fate=FATE)
    def cancel(self, pick: int, sure: bool, which: int, fate: Fate) -> None:
        if sure:
            self.do(self.ops.cancel(self.batch(pick)), which, fate)

    @precondition(lambda self: self.finalizing())
    @rule(which=STORE, fate=FATE)
    def cancel_at_the_last_moment(self, which: int, fate: Fate) -> None:
        self.do(self.ops.cancel(self.finalizing()[0]), which, fate)

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
    @rule(seconds=st.sampled_from([16.0, 9.0, 3.0]), which=STORE, executor=EXECUTOR)
    def wait_and_reconcile(self, seconds: float, which: int, executor: str) -> None:
        """As time goes by with a scheduler and executors that go on."""
        self.fleet.clock.advance(seconds)
        before = len(self.ops.messages)
        self.do(self.ops.reclaim(), which)
        for message in self.ops.messages[before:]:
            self.do(self.ops.deliver(message, executor, 1), which)

    @precondition(lambda self: self.ops.messages)
    @rule(pick=PICK, executor=EXECUTOR, again=st.booleans(), which=STORE, fate=FATE)
    def deliver(self, pick: int, executor: str, again: bool, which: int, fate: Fate) -> None:
        messages = self.ops.messages[::-1]
        message = messages[pick % len(messages)]
        self.do(self.ops.deliver(message, executor, 2 if again else 1), which, fate)

    @precondition(lambda self: self.ops.attempts)
    @rule(
        pick=PICK,
        some=st.just([]) | st.lists(st.integers(0, 8), max_size=4),
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
    @rule(pick=PICK, seconds=st.sampled_from([14.0, 9.0, 15.0]), which=STORE)
    def beat_once_and_reconcile(self, pick: int, seconds: float, which: int) -> None:
        """Of an executor that is slow: one beat keeps its chunk for a lease, and no longer."""
        attempt = self.attempt(pick)
        self.do(self.ops.beat([attempt], started=self.engines_die), which)
        self.fleet.clock.advance(seconds)
        self.do(self.ops.reclaim(), which)

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

    @rule(which=STORE, sure=st.sampled_from([True, False, False]))
    def crash(self, which: int, sure: bool) -> None:
        if sure:
            self.restart(self.fleet.members[which % len(self.fleet.members)])

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 6.0, 9.0, 16.0]))
    def wait(self, seconds: float) -> None:
        self.fleet.clock.advance(seconds)

    @precondition(lambda self: self.frozen)
    @rule(
        pick=PICK,
        days=st.sampled_from([0, 1]),
        which=STORE,
        thaws=st.booleans(),
        fate=st.sampled_from([("", 0)] + [("freeze", number) for number in range(6)]),
    )
    def sweep_beside_what_stands_still(
        self, pick: int, days: int, which: int, thaws: bool, fate: Fate
    ) -> None:
        """It may go on after, or in the middle of, the deletion of what it was about to name."""
        still = self.frozen[pick % len(self.frozen)]
        # A key is good for a day, after which a client that asks again makes another one.
        if not any(each.is_done and each.op.again for each in self.frozen):
            self.fleet.clock.advance(days * DAY_SECONDS)
        self.do(self.ops.sweep(), which, fate)
        if thaws:
            self.frozen.remove(still)
            self.thaw_one(still)

    @precondition(lambda self: self.frozen)
    @rule(pick=PICK)
    def thaw(self, pick: int) -> None:
        self.thaw_one(self.frozen.pop(pick % len(self.frozen)))

    def known(self) -> list[Batch]:
        """Batches whose creation was answered."""
        return [batch for batch in self.model.batches if batch.id]

    def finalizing(self) -> list[Batch]:
        """Those that are sealed, and not cancelled."""
        return [each for each in self.known() if each.status is BatchStatus.FINALIZING]

    def batch(self, pick: int) -> Batch:
        """One of them, the youngest first."""
        found = self.known()[::-1]
        return found[pick % len(found)]

    def attempt(self, pick: int) -> Attempt:
        """One of the attempts, the youngest first."""
        found = self.ops.attempts[::-1]
        return found[pick % len(found)]

    # --- what must be true --------------------------------------------------------------------

    @invariant()
    def every_batch_is_as_the_model_has_it(self) -> None:
        with self.judged():
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
        wanted = _end_files(batch)
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
            self.stop()

    def _come_to_an_end(self) -> None:
        while self.frozen:
            self.thaw_one(self.frozen.pop())
        self._sweep_what_stands_still()
        self.fleet.clock.advance(10_200)
        for seconds in (2.0, 70.0, 0.0):
            for op in (self.ops.validate, self.ops.end, self.ops.finalize):
                self.do(op(), 0)
            self.fleet.clock.advance(seconds)
        self._look()
        assert all(batch.ended for batch in self.model.batches)
        self._nothing_is_left_over()

    def _sweep_what_stands_still(self) -> None:
        """An upload goes on a day later, in the middle of the deletion of what it had announced."""
        self.do(self.ops.sweep(), 0)
        self.do(self.ops.upload(1), 0, ("freeze", self.last_upload))
        self.fleet.clock.advance(DAY_SECONDS)
        self.do(self.ops.sweep(), 1, ("freeze", self.last_sweep))
        while self.frozen:
            self.thaw_one(self.frozen.pop(0))

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
        assert sorted(file.id for file in files.files) == sorted(self.model.files), files
        self.fleet.clock.advance(DAY_SECONDS)
        for _ in range(2):
            self.do(self.ops.sweep(), 0)
        ends = sum(bool(part) for each in self.model.batches for part in _end_files(each))
        blobs = [path for path in (self.fleet.folder / "blobs").rglob("*") if path.is_file()]
        # An input has a line index beside it.
        assert len(blobs) == ends + 2 * len(self.model.files), blobs
        self._check_at_rest()

    def _check_at_rest(self) -> None:
        said: list[dict[str, Any]] = []
        settings = StoreSettings(data_dir=self.fleet.folder, database_url=self.fleet.url)
        # In a thread, as it may want a loop of its own.
        checked = asyncio.to_thread(doctor.check, settings, said.append, deep=True)
        assert not self.run(checked), said


def _end_files(
    batch: Batch,
) -> tuple[list[tuple[int, str | None]], list[tuple[int, str | None]]]:
    """Line and answer of the output file; line and answer, or None, of the error file."""
    files: tuple[list[tuple[int, str | None]], list[tuple[int, str | None]]] = ([], [])
    for line in range(batch.counts[0]):
        found = batch.first.get(line)
        refused = found is None or found.failed
        files[refused].append((line, None if found is None else found.answer))
    return files


def _answer_of(line: dict[str, Any], code: str | None) -> str | None:
    if line["response"] is None:
        assert line["error"]["code"] == code, line
        return None
    answer: str = line["response"]["body"]["answer"]
    return answer
