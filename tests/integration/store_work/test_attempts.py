"""Who may run which lines: attempts are opened, kept, handed back and taken over."""

import re

import pytest

from protos.nightshift.v1 import work_pb2
from services.kit.wire.errors import ConflictError, InvalidRequestError
from tests.integration.store_work.harness import Store
from tests.integration.store_work.worker import ranges_of
from tests.kit.store import POOL, chat_line

pytestmark = pytest.mark.integration

CANCELLED = work_pb2.DROP_REASON_CANCELLED
EXPIRED = work_pb2.DROP_REASON_EXPIRED
SUPERSEDED = work_pb2.DROP_REASON_SUPERSEDED
DONE = work_pb2.DROP_REASON_DONE
LEASE_SECONDS = 15


async def test_a_repeated_call_finds_the_attempt_that_it_opened(store: Store) -> None:
    (dispatch,) = await store.cut((await store.batch(3), 3))
    first = await store.open(dispatch)
    again = await store.open(dispatch)
    assert (again.token, again.attempt) == (first.token, 1)
    assert first.project_id == again.project_id == store.project_id
    # An executor believes these, and not the message that came over the bus.
    for name in ("endpoint", "model", "expires_at_ms", "alone", "batch_id"):
        assert getattr(first, name) == getattr(again, name) == getattr(dispatch, name)
    assert first.model


async def test_another_executor_is_told_how_long_the_first_one_has(store: Store) -> None:
    (dispatch,) = await store.cut((await store.batch(3), 3))
    await store.open(dispatch)
    store.clock.advance(4)
    busy = await store.deliver(dispatch, "e1")
    assert busy.busy.retry_after_ms == (LEASE_SECONDS - 4) * 1000
    store.clock.advance(LEASE_SECONDS - 4)
    assert (await store.open(dispatch, "e1")).attempt == 2


async def test_a_message_that_was_told_to_wait_takes_nothing_when_it_comes_again(
    store: Store,
) -> None:
    """A broker that forgot whom it gave a message gives it to somebody else, as if never before."""
    batch_id = await store.batch(3)
    (dispatch,) = await store.cut((batch_id, 3))
    first = await store.open(dispatch, delivered=2)
    for number in (1, 2, 3, 4):
        busy = await store.deliver(dispatch, "e1", delivered=number)
        assert busy.busy.retry_after_ms == LEASE_SECONDS * 1000
        store.clock.advance(LEASE_SECONDS - 1)
        assert await store.beat({first.token: [(0, 3)]}) == {}
    assert (await store.open(dispatch, delivered=5)).token == first.token
    # Its holder has had that one: if it comes again, he lost it.
    assert (await store.open(dispatch, "e1", delivered=6)).attempt == 2


async def test_who_waits_for_a_holder_that_dies_has_its_lines_when_the_lease_ends(
    store: Store,
) -> None:
    (dispatch,) = await store.cut((await store.batch(3), 3))
    await store.open(dispatch)
    busy = await store.deliver(dispatch, "e1")
    store.clock.advance(busy.busy.retry_after_ms / 1000)
    assert (await store.open(dispatch, "e1", delivered=2)).attempt == 2


async def test_a_message_that_comes_again_takes_over_from_a_live_attempt(store: Store) -> None:
    batch_id = await store.batch(3)
    (dispatch,) = await store.cut((batch_id, 3))
    first = await store.open(dispatch)
    assert await store.beat({first.token: [(0, 3)]}) == {}
    await store.finish(first.token, [1], batch_id)
    second = await store.open(dispatch, "e1", delivered=2)
    # It was alive a moment ago, so nobody is suspected; what is done is not done again.
    assert (second.attempt, ranges_of(second.lines)) == (2, [(0, 1), (2, 1)])
    assert await store.beat({first.token: [(0, 3)]}) == {first.token: SUPERSEDED}
    assert await store.finish(first.token, [0], batch_id) == 1
    assert await store.finish(second.token, [0, 2], batch_id) == 1


async def test_what_a_silent_executor_had_in_its_engine_is_put_apart(store: Store) -> None:
    (dispatch,) = await store.cut((await store.batch(6), 6))
    first = await store.open(dispatch)
    await store.beat({first.token: [(1, 2)]})
    store.clock.advance(10)
    second = await store.open(dispatch, "e1", delivered=2)
    assert ranges_of(second.lines) == [(0, 1), (3, 3)]
    (alone,) = await store.reclaim()
    assert (alone.alone, ranges_of(alone.lines)) == (True, [(1, 2)])


async def test_one_message_that_comes_again_frees_all_that_a_silent_executor_had(
    store: Store,
) -> None:
    one, two = await store.batch(8), await store.batch(4)
    cut = await store.cut((one, 4), (two, 4), (one, 4))
    held = [await store.open(each) for each in cut]
    await store.beat({each.token: [(each.lines[0].first, 2)] for each in held})
    other = await store.open((await store.cut((await store.batch(1), 1)))[0], "e2")
    store.clock.advance(10)
    await store.beat({other.token: [(0, 1)]}, "e2")
    assert ranges_of((await store.open(cut[0], "e1", delivered=2)).lines) == [(2, 2)]
    # Its suspects run together, batch by batch; the rest of its chunks is handed out at once.
    alone, *rest = await store.reclaim()
    assert (alone.batch_id, ranges_of(alone.lines)) == (one, [(0, 2), (4, 2)])
    assert [(each.alone, ranges_of(each.lines)) for each in rest] == [
        (False, [(6, 2)]),
        (False, [(2, 2)]),
    ]
    assert await store.beat({other.token: [(0, 1)]}, "e2") == {}


async def test_an_old_dispatch_is_gone(store: Store) -> None:
    (dispatch,) = await store.cut((await store.batch(3), 3))
    await store.open(dispatch)
    store.clock.advance(LEASE_SECONDS)
    (raised,) = await store.reclaim()
    assert (raised.chunk_id, raised.dispatch) == (dispatch.chunk_id, 2)
    gone = await store.deliver(dispatch, "e1", delivered=5)
    assert gone.gone.reason == "superseded"
    raised.dispatch += 1
    assert (await store.deliver(raised)).gone.reason == "superseded"


async def test_a_finished_or_ended_chunk_is_gone(store: Store) -> None:
    batch_id = await store.batch(4)
    first, second, third = await store.cut((batch_id, 1), (batch_id, 2), (batch_id, 1))
    token = (await store.open(first)).token
    assert await store.finish(token, [0], batch_id) == 1
    assert (await store.deliver(first, delivered=2)).gone.reason == "done"
    # Another attempt's late results may finish a chunk that is not open.
    assert await store.finish(token, [1, 2], batch_id) == 2
    assert (await store.deliver(second)).gone.reason == "done"
    await store.cancel(batch_id)
    assert (await store.deliver(third)).gone.reason == "ended"
    third.chunk_id = "chunk_unknown"
    assert (await store.deliver(third)).gone.reason == "ended"


async def test_no_line_starts_past_the_deadline(store: Store) -> None:
    (dispatch,) = await store.cut((await store.batch(3, window_seconds=5), 3))
    store.clock.advance(5)
    assert (await store.deliver(dispatch)).gone.reason == "ended"


async def test_beats_keep_a_lease_and_frames_do_too(store: Store) -> None:
    batch_id = await store.batch(40)
    beaten, fed, silent = await store.cut((batch_id, 20), (batch_id, 10), (batch_id, 10))
    one, two = await store.open(beaten), await store.open(fed)
    await store.open(silent)
    for step in range(9):
        store.clock.advance(2)
        assert await store.beat({one.token: [(step, 1)]}) == {}
        assert await store.finish(two.token, [20 + step], batch_id) == 1
    assert [each.chunk_id for each in await store.reclaim()] == [silent.chunk_id]
    store.clock.advance(LEASE_SECONDS)
    raised = {each.chunk_id for each in await store.reclaim({POOL: 1})}
    assert raised >= {beaten.chunk_id, fed.chunk_id}


async def test_handing_back_frees_a_chunk_at_once_and_suspects_nobody(store: Store) -> None:
    batch_id = await store.batch(3)
    (dispatch,) = await store.cut((batch_id, 3))
    first = await store.open(dispatch)
    await store.beat({first.token: [(0, 3)]})
    await store.finish(first.token, [1], batch_id)
    await store.hand_back(first.token, executor="somebody else")
    assert (await store.deliver(dispatch, "e1")).WhichOneof("outcome") == "busy"
    await store.hand_back(first.token)
    # The broker is the first to deliver it again …
    second = await store.open(dispatch, "e1", delivered=2)
    assert (second.attempt, ranges_of(second.lines)) == (2, [(0, 1), (2, 1)])
    await store.hand_back(first.token, second.token, executor="e1")
    # … and if it does not, reconciling does.
    (raised,) = await store.reclaim()
    assert (raised.dispatch, raised.alone) == (2, False)
    third = await store.open(raised)
    assert (third.deaths, ranges_of(third.lines)) == (0, [(0, 1), (2, 1)])


async def test_a_closed_token_hands_nothing_back(store: Store) -> None:
    (dispatch,) = await store.cut((await store.batch(3), 3))
    old = await store.open(dispatch)
    store.clock.advance(LEASE_SECONDS)
    (raised,) = await store.reclaim()
    await store.open(raised, "e1")
    await store.hand_back(old.token)
    assert await store.reclaim() == []


async def test_beats_tell_what_to_drop(store: Store) -> None:
    cancelled, late, lost, done, runs = [
        await store.batch(2, window_seconds=seconds) for seconds in (99, 20, 99, 99, 99)
    ]
    dispatches = await store.cut(*((each, 1) for each in (cancelled, late, lost, done, runs)))
    tokens = [(await store.open(each)).token for each in dispatches]
    assert await store.beat({token: [] for token in tokens}) == {}
    await store.finish(tokens[3], [0], done)
    store.clock.advance(LEASE_SECONDS)
    assert await store.beat({tokens[1]: [], tokens[4]: []}) == {}
    assert {each.batch_id for each in await store.reclaim()} == {cancelled, lost}
    await store.cancel(cancelled)
    store.clock.advance(5)
    await store.ender.run_once()
    drops = await store.beat({token: [] for token in [*tokens, "attempt_unknown"]})
    assert drops == {
        tokens[0]: CANCELLED,
        tokens[1]: EXPIRED,
        tokens[2]: SUPERSEDED,
        tokens[3]: DONE,
        "attempt_unknown": DONE,
    }
    # The reason stays once the batch is sealed, and once it has ended.
    store.clock.advance(2)
    await store.ender.run_once()
    drops = await store.beat({tokens[0]: [], tokens[1]: []})
    assert drops == {tokens[0]: CANCELLED, tokens[1]: EXPIRED}


async def test_only_lines_of_the_chunk_are_read(store: Store) -> None:
    batch_id = await store.batch(6)
    (dispatch,) = await store.cut((batch_id, 3))
    attempt = await store.open(dispatch)
    assert set(await store.lines(attempt.token, [(2, 1), (0, 1)])) == {0, 2}
    for ranges in ([(2, 2)], [(5, 1)], [(0, 1), (6, 1)]):
        with pytest.raises(InvalidRequestError):
            await store.lines(attempt.token, ranges)
    with pytest.raises(ConflictError):
        await store.lines("attempt_unknown", [(0, 1)])
    await store.hand_back(attempt.token)
    with pytest.raises(ConflictError):
        await store.lines(attempt.token, [(0, 1)])


async def test_lines_are_read_as_they_stand_whatever_lies_between(store: Store) -> None:
    texts = [chat_line(f"r{n}", "ü" * (n * 997 % 3_000)).rstrip(b"\n") for n in range(200)]
    texts[3] = chat_line("r3", "x" * (5 << 19)).rstrip(b"\n")
    texts[150] = b" " + chat_line("r150", "y" * 100_000).rstrip(b"\n") + b"\t"
    ends = [b"\n", b"\r\n", b"\n\n  \n", b"\r\n\r\n"]
    content = [text + ends[n % 4 if n > 60 else 0] for n, text in enumerate(texts)]
    content[-1] = texts[-1]
    batch_id = await store.batch([b"\xef\xbb\xbf", *content])
    (dispatch,) = await store.cut((batch_id, 200))
    attempt = await store.open(dispatch)
    assert await store.lines(attempt.token, ranges_of(attempt.lines)) == dict(enumerate(texts))
    some = [(0, 4), (50, 20), (99, 1), (149, 3), (199, 1)]
    chosen = {n: texts[n] for first, count in some for n in range(first, first + count)}
    assert await store.lines(attempt.token, some) == chosen


async def test_lines_that_cannot_be_run_wait_ever_longer_and_their_batch_says_why(
    store: Store,
) -> None:
    batch_id = await store.batch(2)
    (dispatch,) = await store.cut((batch_id, 2))
    store.clock.advance(LEASE_SECONDS)
    waits = []
    for _ in range(5):
        attempt = await store.open(dispatch)
        began = store.clock.now()
        await store.hand_back(attempt.token, trouble="its lines cannot be read (bytes)")
        said = (await store.get(batch_id)).nightshift
        assert "its lines cannot be read (bytes). They are tried again" in said.reason
        while not (dispatches := await store.reclaim()):
            store.clock.advance(2.5)
        (dispatch,) = dispatches
        waits.append(store.clock.now() - began)
    assert waits == [5, 10, 20, 40, 60]


async def test_of_two_executors_of_one_name_the_later_one_works(store: Store) -> None:
    """And the other one is told what to change, instead of each undoing the other's work."""
    batch_id = await store.batch(2)
    (first, second) = await store.cut((batch_id, 1), (batch_id, 1))
    await store.register("twin", "i1")
    await store.open(first, "twin", incarnation="i1")
    await store.register("twin", "i2")
    with pytest.raises(ConflictError, match="NIGHTSHIFT_EXECUTOR_NAME") as refused:
        await store.deliver(second, "twin", incarnation="i1")
    assert {"twin", "i1", "i2"} <= set(re.findall(r"\w+", refused.value.message))
    attempt = await store.open(second, "twin", incarnation="i2")
    assert await store.finish(attempt.token, [1], batch_id) == 1
