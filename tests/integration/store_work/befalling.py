"""What may befall an op: nothing, or its store dies or stands still at one of its places."""

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import sqlalchemy as sa
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from services.kit.process.tasks import end
from services.kit.wire.errors import StaleTermError, UnavailableError
from services.store.tables.core import attempts as attempt_rows
from services.store.tables.core import batches as batch_rows
from tests.integration.store_work.crashing import Fleet, Gate, Ground, Member
from tests.integration.store_work.loop_ops import AllOps
from tests.integration.store_work.ops import Check, Op
from tests.integration.store_work.worker import TTL_MS
from tests.kit.store_model_parts import Delivery

_MOST_FROZEN = 3
_DAY_MS = 24 * 3_600_000
_TERMINAL = ("completed", "failed", "expired", "cancelled")

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

    @property
    def is_done(self) -> bool:
        """Whether only its answer is held up."""
        return self.check is not None


class Befalling(RuleBasedStateMachine):
    """Stores and their model, side by side. Subclasses say where stores keep what they share."""

    ground: ClassVar[Ground]
    runner: ClassVar[asyncio.Runner]

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory(prefix="nightshift-machine-")
        self.fleet = self.run(self._open())
        self.ops = AllOps(self.fleet)
        self.ops.sealed_rows = lambda: self.rows(batch_rows.c.sealed_ms.is_not(None))
        self.ops.ended_rows = lambda: self.rows(batch_rows.c.status.in_(_TERMINAL))
        self.ops.open_rows = self._open_attempts
        self.model = self.ops.model
        self.frozen: list[Frozen] = []
        self.sound = True

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

    def _open_attempts(self) -> set[tuple[str, Delivery]]:
        store = self.fleet.members[0].store
        open_ones = sa.select(attempt_rows).where(attempt_rows.c.closed_ms.is_(None))
        return {
            (
                row.chunk_id,
                Delivery(row.dispatch, row.executor_id, row.incarnation, row.num_delivered),
            )
            for row in self.run(store.sql(open_ones))
        }

    # --- how an op is done --------------------------------------------------------------------

    def do(self, op: Op, which: int, fate: Fate = ("", 0)) -> None:
        """Do an op, with what befalls it."""
        with self.judged():
            self._do(op, which, fate)

    @contextlib.contextmanager
    def judged(self) -> Iterator[None]:
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
        self.restart(member)
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

    def thaw_one(self, frozen: Frozen) -> None:
        frozen.gate.open.set()
        answer = self.run(frozen.task)
        waited_ms = self.fleet.now_ms() - frozen.since_ms
        gave_up = isinstance(answer, UnavailableError) and waited_ms >= _DAY_MS
        if gave_up or (isinstance(answer, StaleTermError) and waited_ms >= TTL_MS):
            # What it had announced was dropped meanwhile, or its leadership had run out: the
            # client is told to try again, and nothing has happened.
            assert frozen.check is None
            return
        self._finish(frozen.op, frozen.member, answer, frozen.check)

    def restart(self, member: Member) -> None:
        dropped = [each for each in self.frozen if each.member is member]
        for each in dropped:
            self.frozen.remove(each)
            self.run(_stop(each.task))
        self.run(member.crash())
        for each in dropped:
            if each.is_done and each.op.again:
                # Its answer is lost: the client asks again.
                self._finish(each.op, member, self.run(each.op.on(member)))

    def stop(self) -> None:
        """End all."""
        for frozen in self.frozen:
            self.run(_stop(frozen.task))
        self.run(self.fleet.stop())
        self.place.cleanup()


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
    await end(task)
