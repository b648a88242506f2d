"""API keys, and what was used with each, through the store's gRPC door."""

import hashlib
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from protos.nightshift.v1 import admin_pb2, batches_pb2
from services.kit.calls import rpc
from services.kit.wire.errors import InvalidRequestError, NotFoundError
from tests.kit.store import (
    Client,
    StoreProcess,
    chat_line,
    client_of,
    our_errors,
    running_store,
    store_process,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with store_process(tmp_path_factory.mktemp("store")) as process:
        yield process


@pytest.fixture
async def client(store: StoreProcess) -> AsyncIterator[Client]:
    async with client_of(store) as client:
        yield client


async def create_key(
    client: Client, project_id: str, **fields: object
) -> admin_pb2.CreateKeyResponse:
    """Make a key."""
    request = admin_pb2.CreateKeyRequest(project_id=project_id, **fields)  # type: ignore[arg-type]
    with our_errors():
        return await client.admin.CreateKey(request, metadata=client.metadata)


async def look_up(client: Client, secret: str | None) -> admin_pb2.LookUpKeyResponse:
    """Look a key up as the gateway does; None asks only whether keys are needed."""
    sha256 = b"" if secret is None else hashlib.sha256(secret.encode()).digest()
    request = admin_pb2.LookUpKeyRequest(sha256=sha256)
    with our_errors():
        return await client.admin.LookUpKey(request, metadata=client.metadata)


async def revoke(client: Client, key_id: str, project_id: str = "") -> admin_pb2.ApiKey:
    """End a key."""
    request = admin_pb2.RevokeKeyRequest(key_id=key_id, project_id=project_id)
    with our_errors():
        return (await client.admin.RevokeKey(request, metadata=client.metadata)).key


async def listed(client: Client, project_id: str) -> list[admin_pb2.ApiKey]:
    """List a project's keys."""
    request = admin_pb2.ListKeysRequest(project_id=project_id)
    return list((await client.admin.ListKeys(request, metadata=client.metadata)).keys)


async def test_a_key_is_kept_as_its_hash_only(client: Client, store: StoreProcess) -> None:
    made = await create_key(client, "hashed", name="mine", requests_per_minute=60)
    assert made.secret.startswith(made.key.prefix)
    assert made.secret.endswith(made.key.last_four)
    assert len(made.secret) >= 40
    assert made.key.name == "mine"
    assert made.key.requests_per_minute == 60
    assert await listed(client, "hashed") == [made.key]
    with sqlite3.connect(store.data / "nightshift.db") as database:
        dump = "\n".join(database.iterdump())
    assert made.key.id in dump
    assert made.secret not in dump
    assert made.secret not in store.log()


async def test_a_key_is_found_by_its_hash_until_it_is_revoked(client: Client) -> None:
    made, other = await create_key(client, "a-1"), await create_key(client, "a-1")
    assert made.secret != other.secret
    found = await look_up(client, made.secret)
    assert (found.keys_needed, found.key) == (True, made.key)
    revoked = await revoke(client, made.key.id)
    assert revoked.revoked_at >= made.key.created_at
    assert await revoke(client, made.key.id) == revoked
    gone = await look_up(client, made.secret)
    assert (gone.keys_needed, gone.HasField("key")) == (True, False)
    assert (await look_up(client, other.secret)).key == other.key
    assert await listed(client, "a-1") == [revoked, other.key]
    unknown = await look_up(client, "ns-nobody-has-this-one")
    assert (unknown.keys_needed, unknown.HasField("key")) == (True, False)


async def test_keys_are_needed_once_the_first_was_made_and_for_ever(tmp_path: object) -> None:
    async with running_store(tmp_path) as client:  # type: ignore[arg-type]
        assert await look_up(client, None) == admin_pb2.LookUpKeyResponse()
        assert await look_up(client, "any") == admin_pb2.LookUpKeyResponse()
        made = await create_key(client, "p")
        assert (await look_up(client, None)).keys_needed
        assert (await look_up(client, None)).all_have_checksums
        # As of a key that was made before they had one.
        with sqlite3.connect(Path(str(tmp_path)) / "nightshift.db") as database:
            database.execute("UPDATE api_keys SET prefix = 'ns-abcd'")
        assert not (await look_up(client, None)).all_have_checksums
        # Ending the last key must not open the door to everyone.
        await revoke(client, made.key.id)
        assert (await look_up(client, None)).keys_needed


@pytest.mark.parametrize("name", ["", "P", "a b", "a/b", "../x", "ü", "a" * 65, "a\n"])
async def test_a_project_needs_a_plain_name(client: Client, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="1 to 64 of a-z"):
        await create_key(client, name)


@pytest.mark.parametrize("fields", [{"name": "a" * 101}, {"name": "a\nb"}])
async def test_a_name_is_short_and_printable(client: Client, fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match="100 printable"):
        await create_key(client, "p", **fields)


@pytest.mark.parametrize("limit", [0, -1, 1 << 40])
async def test_a_limit_is_a_number_that_can_be_kept(client: Client, limit: int) -> None:
    with pytest.raises(InvalidRequestError, match="times a minute"):
        await create_key(client, "p", requests_per_minute=limit)


async def test_revoking_what_is_not_there(client: Client) -> None:
    made = await create_key(client, "b")
    with pytest.raises(NotFoundError, match="key_none"):
        await revoke(client, "key_none")
    with pytest.raises(NotFoundError, match=made.key.id):
        await revoke(client, made.key.id, "c")
    assert (await look_up(client, made.secret)).HasField("key")


async def test_only_hashes_are_looked_up(client: Client) -> None:
    with pytest.raises(InvalidRequestError):
        await client_look_up_raw(client, b"short")


async def client_look_up_raw(client: Client, sha256: bytes) -> None:
    """Ask with what is no hash."""
    with our_errors():
        request = admin_pb2.LookUpKeyRequest(sha256=sha256)
        await client.admin.LookUpKey(request, metadata=client.metadata)


async def test_usage_is_summed_by_project_and_key(client: Client) -> None:
    first, second = await create_key(client, "u", name="one"), await create_key(client, "u")
    await create_key(client, "v")
    client.project_id = "u"
    file = await client.upload(chat_line("a") + chat_line("b"))

    async def create(key_id: str | None) -> None:
        secret = (client.store.data / "secret").read_text().strip()
        answer = await client.batches.CreateBatch(
            batches_pb2.CreateBatchRequest(
                input_file_id=file.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
                completion_window_seconds=60,
            ),
            metadata=rpc.metadata(secret, project_id="u", key_id=key_id),
        )
        await client.settled(answer.batch.id, batches_pb2.BATCH_STATUS_IN_PROGRESS)

    for key_id in (second.key.id, first.key.id, first.key.id, None):
        await create(key_id)
    own = await client.batches.GetUsage(batches_pb2.GetUsageRequest(), metadata=client.metadata)
    assert own.project_id == "u"
    assert [
        (part.key_id, part.key_name, part.batches, part.request_counts.total) for part in own.by_key
    ] == [(second.key.id, "", 1, 2), (first.key.id, "one", 2, 4), ("", "", 1, 2)]
    assert not own.by_key[2].HasField("key_id")
    everything = await client.admin.ListUsage(
        admin_pb2.ListUsageRequest(), metadata=client.metadata
    )
    assert [part for part in everything.by_key if part.project_id == "u"] == list(own.by_key)
    one = admin_pb2.ListUsageRequest(project_id="v")
    assert not (await client.admin.ListUsage(one, metadata=client.metadata)).by_key
