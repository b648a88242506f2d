"""A poison line is found within ceil(log2 n) + 3 deaths, and its neighbours succeed.

Every death counts, also the one that made its lines suspects.
"""

import asyncio
import math

import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import batches_pb2, dispatch_pb2, work_pb2
from services.kit.wire.result_line import MESSAGES
from services.store.domain.death_budget import FREE_DEATHS, MOST_DEATHS, SHARE
from services.store.tables.core import batches, blobs, chunks, projects
from services.store.work import lost_content
from tests.integration.store_work.harness import Store
from tests.integration.store_work.losing import input_taken
from tests.integration.store_work.worker import ranges_of

pytestmark = pytest.mark.integration

MAX_ATTEMPTS = 3
COMPLETED = batches_pb2.BATCH_STATUS_COMPLETED


def lines_in(ranges: list[tuple[int, int]]) -> list[int]:
    return [line for first, count in ranges for line in range(first, first + count)]


async def handed_out(store: Store) -> list[dispatch_pb2.Dispatch]:
    """Return what is handed out next, after whatever a batch is held for; empty at the end."""
    while True:
        dispatches = await store.reclaim()
        held = sa.select(batches.c.id).where(batches.c.retry_ms > store.context.now_ms())
        if dispatches or not await store.sql(held.where(batches.c.sealed_ms.is_(None))):
            return dispatches
        store.clock.advance(5)


async def neighbour(store: Store) -> str:
    """Have a batch of another project run in the pool; return its id."""
    other = projects.insert().values(id="other", created_at=1)
    await store.context.db.write("test.step", lambda connection: connection.execute(other))
    store.project_id = "other"
    batch_id = await store.batch(8)
    store.project_id = "default"
    return batch_id


class Engine:
    """A fake engine that dies of some lines; what else it is given it answers."""

    def __init__(self, store: Store, batch_id: str, poison: set[int], *, start_ms: int = 0) -> None:
        self.store = store
        self.start_ms = start_ms
        self.batch_id = batch_id
        self.poison = poison
        self.deaths = 0
        self.attempts: list[int] = []

    async def run(self, dispatch: dispatch_pb2.Dispatch) -> None:
        attempt = await self.store.open(dispatch)
        if dispatch.alone:
            self.attempts.append(attempt.attempt)
        lines = lines_in(ranges_of(attempt.lines))
        if self.poison & set(lines):
            self.deaths += 1
            await self.store.died(
                {attempt.token: ranges_of(attempt.lines)}, complete=True, start_ms=self.start_ms
            )
        else:
            await self.store.finish(attempt.token, lines, self.batch_id)

    async def run_to_the_end(self) -> None:
        """Run what is handed out until nothing is, at most one chunk alone at a time."""
        while dispatches := await handed_out(self.store):
            assert sum(each.alone for each in dispatches) <= 1
            assert [each.alone for each in dispatches] == sorted(
                (each.alone for each in dispatches), reverse=True
            )
            for dispatch in dispatches:
                await self.run(dispatch)
            await self.store.poison.run_once()


@pytest.mark.parametrize(
    ("suspects", "poison"), [(1, 0), (2, 1), (3, 2), (16, 5), (37, 36), (64, 0)]
)
async def test_a_poison_line_is_found_and_its_neighbours_succeed(
    store: Store, suspects: int, poison: int
) -> None:
    total = suspects + 8
    batch_id = await store.batch(total)
    (dispatch,) = await store.cut((batch_id, total))
    attempt = await store.open(dispatch)
    await store.died({attempt.token: [(0, suspects)]}, complete=True)

    engine = Engine(store, batch_id, {poison})
    engine.deaths = 1
    await engine.run_to_the_end()
    assert engine.deaths <= math.ceil(math.log2(suspects)) + 3
    await store.turn()
    batch = await store.get(batch_id)
    assert batch.status == COMPLETED
    assert batch.request_counts == batches_pb2.RequestCounts(
        total=total, completed=total - 1, failed=1
    )
    output, error = await store.end_files(batch_id)
    assert [line["custom_id"] for line in output] == [f"r{n}" for n in range(total) if n != poison]
    (line,) = error
    assert (line["custom_id"], line["response"]) == (f"r{poison}", None)
    assert line["error"] == {"code": "engine_failure", "message": MESSAGES["engine_failure"]}


async def test_several_poison_lines_end_alike(store: Store) -> None:
    batch_id = await store.batch(30)
    (dispatch,) = await store.cut((batch_id, 30))
    engine = Engine(store, batch_id, {3, 4, 29})
    await engine.run(dispatch)
    await engine.run_to_the_end()
    await store.turn()
    _, error = await store.end_files(batch_id)
    assert [line["custom_id"] for line in error] == ["r3", "r4", "r29"]


async def test_a_place_for_blobs_that_does_not_answer_delays_no_seal(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a line to be given up is read from there meanwhile."""
    poison, other = await store.batch(1), await store.batch(1)
    (dispatch,) = await store.cut((poison, 1))
    engine = Engine(store, poison, {0})
    await engine.run(dispatch)
    for _ in range(MAX_ATTEMPTS - 1):
        (alone,) = await store.reclaim()
        await engine.run(alone)
    asked = asyncio.Event()

    async def read(*_: object) -> bytes:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(store.context.blobs, "read", read)
    waiting = asyncio.create_task(store.poison.run_once())
    await asked.wait()
    await store.cancel(other)
    await store.ender.run_once()
    (row,) = await store.sql(sa.select(batches.c.sealed_ms).where(batches.c.id == other))
    assert row.sealed_ms is not None
    assert not waiting.done()
    waiting.cancel()


async def test_a_line_that_dies_less_often_succeeds(store: Store) -> None:
    batch_id = await store.batch(1)
    (dispatch,) = await store.cut((batch_id, 1))
    engine = Engine(store, batch_id, {0})
    await engine.run(dispatch)
    (alone,) = await store.reclaim()
    await engine.run(alone)
    await store.poison.run_once()
    engine.poison = set()
    (alone,) = await store.reclaim()
    assert (await store.open(alone)).deaths == 2
    await engine.run(alone)
    await store.turn()
    assert engine.attempts == [2, 3]
    assert (await store.get(batch_id)).request_counts.completed == 1


async def test_one_chunk_of_a_pool_runs_alone_at_a_time_and_a_hand_back_is_no_death(
    store: Store,
) -> None:
    one, two = await store.batch(4), await store.batch(4)
    cut = await store.cut((two, 4), (one, 4))
    tokens = [(await store.open(each)).token for each in cut]
    await store.died({token: [(0, 4)] for token in tokens})
    (first,) = await store.reclaim()
    assert (first.batch_id, first.alone) == (one, True)
    assert await store.reclaim() == []
    attempt = await store.open(first)
    assert await store.reclaim() == []
    await store.hand_back(attempt.token)
    (again,) = await store.reclaim()
    assert (again.chunk_id, again.dispatch, ranges_of(again.lines)) == (
        first.chunk_id,
        2,
        [(0, 2)],
    )
    await store.finish((await store.open(again)).token, range(2), one)
    (half,) = await store.reclaim()
    assert (half.batch_id, ranges_of(half.lines)) == (one, [(2, 2)])
    await store.finish((await store.open(half)).token, range(2, 4), one)
    (second,) = await store.reclaim()
    assert (second.batch_id, second.alone) == (two, True)


async def test_a_lost_lease_alone_counts_as_a_death(store: Store) -> None:
    batch_id = await store.batch(2)
    (dispatch,) = await store.cut((batch_id, 2))
    await store.died({(await store.open(dispatch)).token: [(0, 2)]})
    (half,) = await store.reclaim()
    assert (half.alone, ranges_of(half.lines), half.dispatch) == (True, [(0, 1)], 1)
    for death in (1, 2, 3):
        attempt = await store.open(half)
        assert attempt.deaths == death
        await store.beat({attempt.token: [(0, 1)]})
        store.clock.advance(15)
        (half,) = await store.reclaim()
    other = half
    assert ranges_of(other.lines) == [(1, 1)]
    await store.finish((await store.open(other)).token, [1], batch_id)
    await store.turn()
    assert (await store.get(batch_id)).request_counts.failed == 1


async def test_lines_that_had_not_entered_the_engine_are_no_suspects(store: Store) -> None:
    batch_id = await store.batch(8)
    (dispatch,) = await store.cut((batch_id, 8))
    await store.died({(await store.open(dispatch)).token: []})
    (raised,) = await store.reclaim()
    assert (raised.alone, raised.line_count, raised.dispatch) == (False, 8, 2)
    await store.died({(await store.open(raised)).token: [(2, 2), (6, 9)]})
    alone, rest = await store.reclaim()
    assert ranges_of(alone.lines) == [(2, 2)]
    assert (rest.alone, ranges_of(rest.lines)) == (False, [(0, 2), (4, 2)])
    await store.finish((await store.open(alone)).token, [2, 3], batch_id)
    (alone,) = [each for each in await store.reclaim() if each.alone]
    assert ranges_of(alone.lines) == [(6, 2)]
    # Of a chunk alone, only those that had entered are halved; the others run after them.
    await store.died({(await store.open(alone)).token: [(7, 1)]})
    seen = []
    while dispatches := [each for each in await store.reclaim() if each.alone]:
        (each,) = dispatches
        seen.append(ranges_of(each.lines))
        await store.finish((await store.open(each)).token, lines_in(seen[-1]), batch_id)
    assert seen == [[(6, 1)], [(7, 1)]]


async def test_an_executor_that_always_dies_with_its_engine_is_no_endless_story(
    store: Store,
) -> None:
    """No beat ever tells what was in the engine, as when a container dies as a whole."""
    batch_id = await store.batch(6)
    (dispatch,) = await store.cut((batch_id, 6))
    deaths = 0
    while (await store.get(batch_id)).request_counts.failed == 0:
        attempt = await store.open(dispatch, incarnation=f"i{deaths:03}")
        if 4 in lines_in(ranges_of(attempt.lines)):
            deaths += 1
            await store.register(incarnation=f"i{deaths:03}")
        else:
            await store.finish(attempt.token, lines_in(ranges_of(attempt.lines)), batch_id)
        (dispatch,) = await store.reclaim() or [None]
        await store.poison.run_once()
        assert deaths <= 3 + 10 * (1 + math.ceil(math.log2(6)) + MAX_ATTEMPTS)
    for left in range(3):
        if dispatch is not None:
            attempt = await store.open(dispatch, incarnation=f"i{deaths:03}")
            await store.finish(attempt.token, lines_in(ranges_of(attempt.lines)), batch_id)
        (dispatch,) = await store.reclaim() or [None]
        assert left < 2 or dispatch is None
    await store.turn()
    output, error = await store.end_files(batch_id)
    assert [line["custom_id"] for line in error] == ["r4"]
    assert len(output) == 5


async def test_an_executor_that_dies_before_it_begins_condemns_nobody_for_long(
    store: Store,
) -> None:
    """A machine that cannot keep its executor alive is no line's fault."""
    batch_id = await store.batch(8)
    (dispatch,) = await store.cut((batch_id, 8))
    lives = 40
    for life in range(lives):
        await store.open(dispatch, incarnation=f"i{life:03}")
        await store.register(incarnation=f"i{life + 1:03}")
        (dispatch, *_) = await store.reclaim()
        await store.poison.run_once()
    assert (await store.get(batch_id)).request_counts.failed == 0
    waiting = [dispatch]
    while waiting:
        for each in waiting:
            attempt = await store.open(each, "e1")
            await store.finish(attempt.token, lines_in(ranges_of(attempt.lines)), batch_id)
        waiting = await store.reclaim()
    await store.turn()
    assert (await store.get(batch_id)).request_counts.completed == 8


async def test_what_a_frozen_executor_seemed_to_lose_is_not_counted(store: Store) -> None:
    """However often it freezes: the line is not to blame, as it is alive to tell."""
    batch_id = await store.batch(1)
    (dispatch,) = await store.cut((batch_id, 1))
    attempt = await store.open(dispatch)
    await store.died({attempt.token: [(0, 1)]}, complete=True)
    for _ in range(2 * MAX_ATTEMPTS):
        (alone,) = await store.reclaim()
        attempt = await store.open(alone)
        await store.beat({attempt.token: [(0, 1)]})
        store.clock.advance(16)
        assert await store.reclaim()
        # It goes on, and hears that it lost the chunk. Twice, which changes nothing.
        for _ in range(2):
            drops = await store.beat({attempt.token: [(0, 1)]})
            assert drops == {attempt.token: work_pb2.DROP_REASON_SUPERSEDED}
        store.clock.advance(3)
        await store.poison.run_once()
    assert (await store.get(batch_id)).request_counts.failed == 0
    (alone,) = await store.reclaim()
    attempt = await store.open(alone)
    assert attempt.deaths == 1
    await store.finish(attempt.token, [0], batch_id)
    await store.turn()
    assert (await store.get(batch_id)).request_counts.completed == 1


async def test_two_executors_with_several_killers_condemn_nobody_else(store: Store) -> None:
    """Two batches share both engines; each has lines that kill, and lines that never do."""
    one, two = await store.batch(48), await store.batch(48)
    killers = {one: {7, 40}, two: {0, 47}}
    # The two lie in other engines than their neighbours in the file.
    await store.register("e1", "i0")
    dispatches = await store.cut((one, 24), (two, 24), (one, 24), (two, 24))
    halves = [dispatches[0::2], dispatches[1::2]]
    deaths = 0
    for executor, mine in enumerate(halves):
        opened = [await store.open(each, f"e{executor}") for each in mine]
        started = {each.token: ranges_of(each.lines) for each in opened}
        await store.died(started, f"e{executor}", complete=True)
        deaths += 1
    while waiting := await handed_out(store):
        for number, dispatch in enumerate(waiting):
            assert dispatch.alone
            executor = f"e{(deaths + number) % 2}"
            attempt = await store.open(dispatch, executor)
            lines = lines_in(ranges_of(attempt.lines))
            if killers[dispatch.batch_id] & set(lines):
                deaths += 1
                await store.died({attempt.token: ranges_of(attempt.lines)}, executor, complete=True)
            else:
                await store.finish(attempt.token, lines, dispatch.batch_id)
        await store.poison.run_once()
    assert deaths <= 4 * (math.ceil(math.log2(48)) + 3)
    await store.turn()
    for batch_id, expected in killers.items():
        output, error = await store.end_files(batch_id)
        assert {line["custom_id"] for line in error} == {f"r{line}" for line in expected}
        assert len(output) == 48 - len(expected)


async def test_a_batch_of_killers_gets_a_share_of_its_pool_and_ends(store: Store) -> None:
    """Each engine takes 20 s to start; there is one."""
    await neighbour(store)
    batch_id = await store.batch(60)
    (dispatch,) = await store.cut((batch_id, 60))
    engine = Engine(store, batch_id, set(range(60)), start_ms=20_000)
    began = store.clock.now()
    await engine.run(dispatch)
    await engine.run_to_the_end()
    # One more, which made all of them suspects; and each part that waited then dies once.
    assert FREE_DEATHS < engine.deaths <= MOST_DEATHS + 1 + 2 * math.log2(60)
    assert store.clock.now() - began >= (engine.deaths - 2 - FREE_DEATHS) * 20 / SHARE
    await store.turn()
    batch = await store.get(batch_id)
    assert (batch.status, batch.request_counts.failed) == (COMPLETED, 60)
    _, error = await store.end_files(batch_id)
    assert [line["custom_id"] for line in error] == [f"r{n}" for n in range(60)]
    assert {line["error"]["code"] for line in error} == {"engine_failure"}
    assert {line["error"]["message"] for line in error} == {
        MESSAGES["engine_failure"],
        MESSAGES["engine_failure untried"],
    }


async def test_a_pool_that_works_for_nobody_else_holds_nothing(store: Store) -> None:
    batch_id = await store.batch(60)
    (dispatch,) = await store.cut((batch_id, 60))
    engine = Engine(store, batch_id, set(range(60)), start_ms=20_000)
    began = store.clock.now()
    await engine.run(dispatch)
    await engine.run_to_the_end()
    assert engine.deaths > FREE_DEATHS
    assert store.clock.now() == began
    await store.turn()
    assert (await store.get(batch_id)).request_counts.failed == 60


async def test_a_batch_that_is_held_says_why(store: Store) -> None:
    other = await neighbour(store)
    batch_id = await store.batch(60)
    (dispatch,) = await store.cut((batch_id, 60))
    engine = Engine(store, batch_id, set(range(60)), start_ms=20_000)
    await engine.run(dispatch)
    while dispatches := await store.reclaim():
        for each in dispatches:
            await engine.run(each)
    reason = (await store.get(batch_id)).nightshift.reason
    assert "its lines ended the engine 11 times" in reason
    # An attempt of before that reads its lines only now ends no hold.
    await lost_content.found_again(store.context, batch_id)
    assert await store.reclaim() == []
    # Nothing more of it is cut, and it goes on by itself.
    assert [each.batch_id for each in (await store.window()).batches] == [other]
    store.clock.advance(20 / SHARE + 1)
    assert len(await store.reclaim()) == 1


async def test_many_batches_of_one_killer_each_get_no_more_than_one_of_many(store: Store) -> None:
    other = await neighbour(store)
    batch_ids = [await store.batch(1) for _ in range(13)]
    engines = {each: Engine(store, each, {0}, start_ms=20_000) for each in batch_ids}
    *cut, unopened = await store.cut(*[(each, 1) for each in batch_ids[:-1]])
    for dispatch in cut:
        await engines[dispatch.batch_id].run(dispatch)
    # The eleventh engine is gone. Nothing more of the project is searched, begun or opened.
    assert await store.reclaim() == []
    assert [each.batch_id for each in (await store.window()).batches] == [other]
    assert await store.cut((batch_ids[-1], 1)) == []
    assert (await store.deliver(unopened)).WhichOneof("outcome") == "busy"
    store.clock.advance(20 / SHARE + 1)
    again = await store.reclaim()
    assert [each.alone for each in again] == [True, False]
    assert len(await store.cut((batch_ids[-1], 1))) == 1


async def test_suspects_of_others_come_before_those_of_a_batch_of_killers(store: Store) -> None:
    killers, sound = await store.batch(8), await neighbour(store)
    (dispatch,) = await store.cut((killers, 8))
    engine = Engine(store, killers, set(range(8)))
    await engine.run(dispatch)
    (alone,) = await store.reclaim()
    await engine.run(alone)
    # Its lines were in an engine with one that kills.
    (dispatch,) = await store.cut((sound, 8))
    attempt = await store.open(dispatch)
    await store.died({attempt.token: [(0, 4)]})
    batch_ids = []
    for _ in range(2):
        (alone,) = [each for each in await store.reclaim() if each.alone]
        batch_ids.append(alone.batch_id)
        attempt = await store.open(alone)
        await store.finish(attempt.token, lines_in(ranges_of(attempt.lines)), sound)
    assert batch_ids == [sound, sound]


async def test_a_restarted_executor_gives_up_what_its_last_process_held(store: Store) -> None:
    batch_id = await store.batch(9)
    first, second, third = await store.cut((batch_id, 3), (batch_id, 3), (batch_id, 3))
    one, two = await store.open(first), await store.open(second)
    other = await store.open(third, "e1")
    await store.beat({one.token: [(1, 1)], two.token: [(4, 1)]})
    await store.beat({other.token: [(6, 3)]}, "e1")
    await store.hand_back(two.token)
    await store.register("e0", "i1")
    raised = await store.reclaim({})
    assert [(each.alone, ranges_of(each.lines)) for each in raised] == [
        (True, [(1, 1)]),
        (False, [(0, 1), (2, 1)]),
        (False, [(3, 3)]),
    ]
    await store.register("e0", "i1")
    assert await store.beat({other.token: []}, "e1") == {}


async def test_a_death_changes_nothing_of_a_batch_that_stops(store: Store) -> None:
    batch_id = await store.batch(3)
    (dispatch,) = await store.cut((batch_id, 3))
    attempt = await store.open(dispatch)
    await store.cancel(batch_id)
    await store.died({attempt.token: [(0, 3)]})
    await store.turn()
    batch = await store.get(batch_id)
    assert batch.status == batches_pb2.BATCH_STATUS_CANCELLED
    assert batch.request_counts == batches_pb2.RequestCounts(total=3)


async def test_a_late_result_of_a_line_about_to_be_given_up_counts_and_holds_nobody_up(
    store: Store,
) -> None:
    batch_id = await store.batch(2)
    (dispatch,) = await store.cut((batch_id, 2))
    silent = await store.open(dispatch, "e0")
    await store.beat({silent.token: [(0, 1)]}, "e0")
    store.clock.advance(20)
    for _ in range(MAX_ATTEMPTS):
        (alone,) = [each for each in await store.reclaim() if each.alone]
        attempt = await store.open(alone, "e1")
        await store.died({attempt.token: [(0, 1)]}, "e1")

    await store.finish(silent.token, [0], batch_id)
    async with asyncio.timeout(10):
        await store.poison.run_once()

    assert (await store.get(batch_id)).request_counts.completed == 1
    assert (await store.get(batch_id)).request_counts.failed == 0


async def test_a_chunk_whose_lines_all_got_results_elsewhere_is_not_queued_again(
    store: Store,
) -> None:
    batch_id = await store.batch(3)
    (dispatch,) = await store.cut((batch_id, 2))
    frozen = (await store.open(dispatch)).token
    await store.beat({frozen: [(0, 2)]})
    store.clock.advance(15)
    (alone,) = await store.reclaim()
    await store.open(alone, "e1")
    # Its executor was not dead, and finishes what runs elsewhere by now.
    assert await store.finish(frozen, [0, 1], batch_id) == 2
    store.clock.advance(15)
    assert await store.reclaim() == []
    (row,) = await store.sql(sa.select(chunks.c.state).where(chunks.c.alone))
    assert row.state == "done"


async def test_a_poison_line_whose_input_is_nobodys_keeps_no_batch_from_its_end(
    store: Store,
) -> None:
    """By its blob's own row the input is not even missing, so that there is nothing to wait for."""
    batch_id, other = await store.batch(1), await store.batch(1)
    (dispatch,) = await store.cut((batch_id, 1))
    token = (await store.open(dispatch)).token
    for _ in range(MAX_ATTEMPTS + 1):
        await store.died({token: [(0, 1)]}, complete=True)
        for again in await store.reclaim():
            token = (await store.open(again)).token
    name, _ = await input_taken(store, batch_id)
    await store.context.db.write(
        "test.step",
        lambda connection: connection.execute(
            blobs.update().where(blobs.c.name == name).values(state="doomed")
        ),
    )
    async with asyncio.timeout(30):
        await store.poison.run_once()
        await store.cancel(other)
        await store.turn()
    assert (await store.get(other)).status == batches_pb2.BATCH_STATUS_CANCELLED
