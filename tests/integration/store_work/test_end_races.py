"""Ends that race: cancels, deadlines, last results and deletions at the same moment, on any store.

Whoever wins, a batch ends on time, an acknowledged cancel ends in `cancelled`, and each line stands
once in what is left.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos.nightshift.v1 import batches_pb2, files_pb2
from services.kit.wire.errors import ConflictError, NotFoundError
from services.store.domain.state import TIMESTAMP_COLUMN, BatchStatus
from services.store.tables.core import batches
from tests.integration.store_work.crashing import Fleet, Ground, PostgresGround, SQLiteGround
from tests.integration.store_work.harness import Store
from tests.integration.store_work.ops import status_of
from tests.kit.postgres import StoreDatabases
from tests.kit.store import chat_line, our_errors

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(36_000),
    pytest.mark.usefixtures("patient_clients"),
]

EXAMPLES = int(os.environ.get("NIGHTSHIFT_MODEL_EXAMPLES", "0"))
LINES = 4
WINDOW_SECONDS = 30
STOP_MS = 2_000
STAGES = ("validating", "in_progress", "last_lines", "finalizing")
ACTS = (
    *("cancel", "finish", "half", "deadline", "hand_back", "delete"),
    *("validate", "end", "finalize"),
)
_ENDS = {
    BatchStatus.CANCELLED: "batch_cancelled",
    BatchStatus.EXPIRED: "batch_expired",
    BatchStatus.COMPLETED: None,
}


@dataclass
class Race:
    """One batch, and what the store said while everything happened to it at once."""

    fleet: Fleet
    batch_id: str = ""
    file_id: str = ""
    token: str = ""
    accepted: int = 0
    acknowledged: bool = False
    refused: bool = False
    late: bool = False
    busy: dict[tuple[str, int], asyncio.Lock] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        """The first one."""
        return self.fleet.members[0].store

    async def begin(self, stage: str) -> None:
        """Bring a batch so far."""
        store = self.store
        content = b"".join(chat_line(f"r{line}") for line in range(LINES))
        self.file_id = (await store.upload(content)).id
        self.batch_id = (await store.create(self.file_id, window_seconds=WINDOW_SECONDS)).id
        if stage == "validating":
            return
        await store.validator.run_once()
        (dispatch,) = await store.cut((self.batch_id, LINES))
        self.token = (await store.open(dispatch)).token
        if stage == "last_lines":
            await self.half(store)
        elif stage == "finalizing":
            await self.finish(store)

    async def all_at_once(self, acts: list[tuple[str, int]]) -> None:
        """Do these at the same moment, each through one of the stores."""
        members = self.fleet.members
        await asyncio.gather(
            *(getattr(self, act)(members[which % len(members)].store) for act, which in acts)
        )

    # --- what may happen ----------------------------------------------------------------------

    async def cancel(self, store: Store) -> None:
        try:
            answer = await store.cancel(self.batch_id)
        except ConflictError:
            self.refused = True
        else:
            assert status_of(answer) in (BatchStatus.CANCELLING, BatchStatus.CANCELLED)
            self.acknowledged = True

    async def finish(self, store: Store) -> None:
        await self._append(store, range(LINES))

    async def half(self, store: Store) -> None:
        await self._append(store, range(LINES // 2))

    async def _append(self, store: Store, lines: range) -> None:
        if self.token:
            accepted = await store.finish(self.token, lines, self.batch_id, failed=[0])
            self.accepted += accepted

    async def hand_back(self, store: Store) -> None:
        if self.token:
            await store.hand_back(self.token)

    async def deadline(self, store: Store) -> None:
        if not self.late:
            self.late = True
            self.fleet.clock.advance(WINDOW_SECONDS)
        await self.end(store)

    async def delete(self, store: Store) -> None:
        try:
            with our_errors():
                request = files_pb2.DeleteFileRequest(file_id=self.file_id)
                await store.files.DeleteFile(request, metadata=store.metadata)
        except NotFoundError:
            return

    async def validate(self, store: Store) -> None:
        await self._turn("validate", store, store.validator.run_once)

    async def end(self, store: Store) -> None:
        await self._turn("end", store, store.ender.run_once)

    async def finalize(self, store: Store) -> None:
        await self._turn("finalize", store, store.finalizer.run_once)

    async def _turn(self, name: str, store: Store, turn: Callable[[], Awaitable[int]]) -> None:
        # A loop takes one turn at a time.
        async with self.busy.setdefault((name, id(store)), asyncio.Lock()):
            await turn()

    # --- what must be true of it --------------------------------------------------------------

    async def come_to_its_end(self) -> None:
        """Two seconds and a turn of each loop are enough, whatever happened."""
        if not (self.acknowledged or self.late):
            await self.validate(self.store)
            await self.cancel(self.store)
        self.fleet.clock.advance(STOP_MS / 1000)
        for turn in (self.end, self.finalize):
            await turn(self.store)

    async def check(self) -> None:
        """Look at it from outside, and at what only its row tells."""
        shown = await self.store.get(self.batch_id)
        end = status_of(shown)
        if self.acknowledged:
            assert end is BatchStatus.CANCELLED, shown
        else:
            assert end in (BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.FAILED), shown
        assert not (self.acknowledged and self.refused)
        completed, failed = shown.request_counts.completed, shown.request_counts.failed
        assert completed + failed == self.accepted
        assert shown.usage.input_tokens == 3 * self.accepted
        times = [getattr(shown, column) for column in TIMESTAMP_COLUMN.values()]
        assert max(times) == getattr(shown, TIMESTAMP_COLUMN[end]), shown
        if end is not BatchStatus.FAILED:
            await self._check_files(shown, _ENDS[end])
        columns = (batches.c.stopping_ms, batches.c.sealed_ms)
        query = sa.select(*columns).where(batches.c.id == self.batch_id)
        ((stopping_ms, sealed_ms),) = await self.store.sql(query)
        assert sealed_ms is not None
        if stopping_ms is not None:
            assert sealed_ms - stopping_ms <= STOP_MS
        before = shown
        await self.finish(self.store)
        assert await self.store.get(self.batch_id) == before

    async def _check_files(self, shown: batches_pb2.Batch, code: str | None) -> None:
        output, error = await self.store.end_files(self.batch_id)
        ids = sorted(line["custom_id"] for line in output + error)
        total = shown.request_counts.total
        assert ids == [f"r{line}" for line in range(total)]
        never_ran = {line["error"]["code"] for line in error if line["error"]}
        assert len(output) == shown.request_counts.completed
        # One that was sealed by its deadline says so, also where a cancel came after that.
        assert never_ran <= {code, "batch_expired"} if self.late else never_ran <= {code}


async def run_race(fleet: Fleet, stage: str, acts: list[tuple[str, int]]) -> None:
    race = Race(fleet)
    await race.begin(stage)
    await race.all_at_once(acts)
    await race.come_to_its_end()
    await race.check()


def race_on(ground: Ground, folder: Path, examples: int) -> None:
    act = st.tuples(st.sampled_from(ACTS), st.integers(0, 1))
    with asyncio.Runner() as loop:
        fleet = Fleet(ground, folder)
        loop.run(fleet.start())

        @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
        @given(stage=st.sampled_from(STAGES), acts=st.lists(act, min_size=2, max_size=7))
        def each(stage: str, acts: list[tuple[str, int]]) -> None:
            loop.run(run_race(fleet, stage, acts))

        try:
            each()
        finally:
            loop.run(fleet.stop())


def test_at_one_store(tmp_path: Path) -> None:
    race_on(SQLiteGround(tmp_path), tmp_path / "data", EXAMPLES or 60)


def test_at_two_stores(tmp_path: Path, store_databases: StoreDatabases) -> None:
    race_on(PostgresGround(store_databases), tmp_path / "data", EXAMPLES or 25)
