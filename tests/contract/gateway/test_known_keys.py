"""What a gateway remembers of keys, and for how long."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.gateway.clients import Store
from services.gateway.keys import CACHE_SECONDS, KeyAuth
from services.kit import rpc
from services.kit.clock import ManualClock
from services.kit.errors import AuthenticationError, UnavailableError
from tests.kit.public_store import SECRET, ScriptedStore

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

KEY = "ns-the-key-of-project-a-000000000000"


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


async def test_what_is_remembered_is_bounded(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.keys.MAX_CACHED", 3)
    store, auth, _ = asked
    for number in (1, 2, 3, 4, 4, 1):
        await auth.authenticate(f"Bearer {number}")
    # The fourth drove the first out, which is asked for anew.
    assert len(store.key_lookups) == 5


async def test_a_store_that_is_away_is_asked_again(asked: Asked) -> None:
    store, auth, _ = asked
    store.add_key(KEY, project_id="a")
    port = store.port
    await store.stop()
    with pytest.raises(UnavailableError):
        await auth.authenticate(f"Bearer {KEY}")
    await store.start(f"127.0.0.1:{port}")
    assert (await auth.authenticate(f"Bearer {KEY}")).project_id == "a"
