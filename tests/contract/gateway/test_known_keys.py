"""What a gateway remembers of keys, and for how long."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.gateway.keys import CACHE_SECONDS, WRONG_PER_MINUTE, KeyAuth
from services.gateway.store import Store
from services.kit.calls import rpc
from services.kit.process.clock import ManualClock
from services.kit.wire.api_keys import new_key
from services.kit.wire.errors import AuthenticationError, RateLimitedError, UnavailableError
from tests.kit.public_store import SECRET, ScriptedStore

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

KEY = new_key(bytes(32))
OLD = "ns-" + "o" * 43
CLIENT = "203.0.113.7"


def made_up(number: int) -> str:
    """Return a key of good form."""
    return new_key(number.to_bytes(32, "big", signed=True))


@pytest_asyncio.fixture(loop_scope="session")
async def asked() -> AsyncIterator[tuple[ScriptedStore, KeyAuth, ManualClock]]:
    """A gateway's memory of keys alone, with a clock that can be set."""
    store = ScriptedStore()
    await store.start()
    clock = ManualClock()
    async with rpc.open_channel(f"127.0.0.1:{store.port}") as opened:
        yield store, KeyAuth(Store(opened, SECRET), clock), clock
    await store.stop()


Asked = tuple[ScriptedStore, KeyAuth, ManualClock]


async def test_a_revoked_key_is_good_for_two_seconds_at_most(asked: Asked) -> None:
    store, auth, clock = asked
    store.add_key(KEY, project_id="a")
    assert (await auth.authenticate(f"Bearer {KEY}")).project_id == "a"
    store.keys.clear()
    clock.advance(CACHE_SECONDS - 0.01)
    assert (await auth.authenticate(f"Bearer {KEY}")).project_id == "a"
    assert len(store.key_lookups) == 1
    clock.advance(0.01)
    with pytest.raises(AuthenticationError):
        await auth.authenticate(f"Bearer {KEY}")
    assert CACHE_SECONDS <= 5


async def test_keys_are_needed_soon_after_the_first_is_made(asked: Asked) -> None:
    store, auth, clock = asked
    for shown in ("", "Bearer any"):
        identity = await auth.authenticate(shown)
        assert (identity.project_id, identity.key_id) == ("default", None)
    store.add_key(KEY, project_id="a")
    # The new key is its project at once; others are asked for one a moment later.
    assert (await auth.authenticate(f"Bearer {KEY}")).project_id == "a"
    clock.advance(CACHE_SECONDS)
    for shown in ("", "Bearer any"):
        with pytest.raises(AuthenticationError):
            await auth.authenticate(shown)


async def test_many_at_once_ask_the_store_once(asked: Asked) -> None:
    store, auth, _ = asked
    store.add_key(KEY, project_id="a")
    waiting = [asyncio.create_task(auth.authenticate(f"Bearer {KEY}")) for _ in range(50)]
    await asyncio.sleep(0)
    # One that goes away takes nothing from the others.
    waiting[0].cancel()
    done = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(done[0], asyncio.CancelledError)
    assert {one.project_id for one in done[1:]} == {"a"}  # type: ignore[union-attr]
    assert len(store.key_lookups) == 1


async def test_made_up_keys_are_refused_without_asking_the_store(asked: Asked) -> None:
    store, auth, clock = asked
    store.add_key(KEY, project_id="a")
    store.add_key(OLD, project_id="old")
    mistyped = f"{KEY[:9]}{'x' if KEY[9] != 'x' else 'y'}{KEY[10:]}"
    for number in range(200):
        for key in (f"wrong {number}", f"sk-{number:048}", mistyped):
            with pytest.raises(AuthenticationError):
                await auth.authenticate(f"Bearer {key}", CLIENT)
    assert store.key_lookups == [b""]
    # One of the form without a checksum is asked for while there are good ones of it.
    assert (await auth.authenticate(f"Bearer {OLD}", CLIENT)).project_id == "old"
    assert len(store.key_lookups) == 2
    store.keys.pop(hashlib.sha256(OLD.encode()).digest())
    store.all_have_checksums = True
    clock.advance(CACHE_SECONDS)
    for number in range(200):
        with pytest.raises(AuthenticationError):
            await auth.authenticate(f"Bearer ns-{number:043}", CLIENT)
    assert store.key_lookups[2:] == [b""]


async def test_wrong_keys_push_out_no_good_one(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.keys.MAX_OTHERS", 3)
    store, auth, _ = asked
    store.add_key(KEY, project_id="a")
    await auth.authenticate(f"Bearer {KEY}", CLIENT)
    for number in (1, 2, 3, 4, 4, 1):
        with pytest.raises(AuthenticationError):
            await auth.authenticate(f"Bearer {made_up(number)}", CLIENT)
    # The fourth drove the first wrong one out, which is asked for anew.
    assert len(store.key_lookups) == 6
    await auth.authenticate(f"Bearer {KEY}", CLIENT)
    assert len(store.key_lookups) == 6


async def test_an_address_with_many_wrong_keys_waits_and_its_good_ones_do_not(
    asked: Asked,
) -> None:
    store, auth, clock = asked
    good, unseen = made_up(-1), made_up(-2)
    store.add_key(good, project_id="a")
    store.add_key(unseen, project_id="b")
    await auth.authenticate(f"Bearer {good}", CLIENT)
    refused: dict[type[Exception], int] = Counter()
    for number in range(500):
        with pytest.raises((AuthenticationError, RateLimitedError)) as caught:
            await auth.authenticate(f"Bearer {made_up(number)}", CLIENT)
        refused[type(caught.value)] += 1
    assert refused == {AuthenticationError: WRONG_PER_MINUTE, RateLimitedError: 440}
    assert len(store.key_lookups) == 1 + WRONG_PER_MINUTE
    assert isinstance(caught.value, RateLimitedError)
    assert caught.value.retry_after_seconds is not None
    # A key that was good is asked for again, as ever; and another address has its own limit.
    clock.advance(CACHE_SECONDS)
    for number in range(500, 505):
        with pytest.raises((AuthenticationError, RateLimitedError)):
            await auth.authenticate(f"Bearer {made_up(number)}", CLIENT)
    lookups = len(store.key_lookups)
    with pytest.raises(RateLimitedError):
        await auth.authenticate(f"Bearer {unseen}", CLIENT)
    assert (await auth.authenticate(f"Bearer {good}", CLIENT)).project_id == "a"
    assert len(store.key_lookups) == lookups + 1
    assert (await auth.authenticate(f"Bearer {unseen}", "203.0.113.8")).project_id == "b"
    clock.advance(caught.value.retry_after_seconds)
    with pytest.raises(AuthenticationError):
        await auth.authenticate(f"Bearer {made_up(600)}", CLIENT)


async def test_a_store_that_is_away_is_asked_again(asked: Asked) -> None:
    store, auth, _ = asked
    store.add_key(KEY, project_id="a")
    port = store.port
    await store.stop()
    with pytest.raises(UnavailableError):
        await auth.authenticate(f"Bearer {KEY}")
    await store.start(f"127.0.0.1:{port}")
    assert (await auth.authenticate(f"Bearer {KEY}")).project_id == "a"
