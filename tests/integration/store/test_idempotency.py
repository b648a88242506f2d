"""One key, one object, for a day: whatever is repeated, raced or killed in between."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import batches_pb2, batches_pb2_grpc, common_pb2, files_pb2
from services.kit.calls import rpc
from services.kit.wire import ids
from services.kit.wire.errors import ConflictError, InvalidRequestError, NightshiftError
from services.kit.wire.ids import ProjectId
from services.store.admin import idempotency_repo
from services.store.db import migrate
from services.store.db.database import Database
from services.store.tables.core import projects
from services.store.tables.keys import idempotency_keys
from tests.kit.eventually import eventually
from tests.kit.store import (
    Client,
    StoreProcess,
    chat_line,
    client_of,
    our_errors,
    running_store,
    store_process,
)
from tests.kit.streams import told
from tests.kit.tcp_proxy import TcpProxy

pytestmark = pytest.mark.slow

BATCH: dict[str, Any] = {
    "input_file_id": "file-1",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
    "metadata": {"b": "2", "a": "1"},
    "has_metadata": True,
    "completion_window_seconds": 60,
}
DAY_MS = 24 * 3_600_000


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with store_process(tmp_path_factory.mktemp("store")) as process:
        yield process


@pytest.fixture
async def client(store: StoreProcess) -> AsyncIterator[Client]:
    async with client_of(store) as client:
        yield client


def metadata(client: Client, key: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a creation under a key."""
    return (*client.metadata, (rpc.IDEMPOTENCY_KEY, key))


async def create(client: Client, key: str, **changes: Any) -> batches_pb2.Batch:
    """Create a batch under a key."""
    request = batches_pb2.CreateBatchRequest(**{**BATCH, **changes})
    with our_errors():
        answer = await client.batches.CreateBatch(request, metadata=metadata(client, key))
    return answer.batch


async def upload(
    client: Client,
    key: str,
    content: bytes = chat_line("a"),
    *,
    filename: str = "in.jsonl",
    purpose: str = "batch",
    seconds: int | None = None,
    frame_bytes: int = 1 << 20,
) -> files_pb2.File:
    """Upload a file under a key."""
    after = None
    if seconds is not None:
        after = files_pb2.ExpiresAfter(anchor="created_at", seconds=seconds)

    def frames() -> Iterable[files_pb2.UploadFileRequest]:
        yield files_pb2.UploadFileRequest(header=files_pb2.UploadFileHeader(filename=filename))
        for start in range(0, len(content), frame_bytes):
            yield files_pb2.UploadFileRequest(data=content[start : start + frame_bytes])
        footer = files_pb2.UploadFileFooter(purpose=purpose, expires_after=after)
        yield files_pb2.UploadFileRequest(footer=footer)

    with our_errors():
        call = client.files.UploadFile(frames(), metadata=metadata(client, key))
        file: files_pb2.File = (await told(call)).file
        return file


async def test_the_same_request_gives_the_same_batch(client: Client) -> None:
    first = await create(client, "same")
    again = await create(client, "same", metadata={"a": "1", "b": "2"})
    assert again.id == first.id
    assert (await create(client, "another")).id != first.id
    client.project_id = "default"
    assert (await create(client, "")).id != (await create(client, "")).id


@pytest.mark.parametrize(
    "change",
    [
        {"input_file_id": "file-2"},
        {"endpoint": "/v1/embeddings"},
        {"completion_window": "10s"},
        {"metadata": {"a": "1"}},
        {"metadata": {}, "has_metadata": False},
        {"output_expires_after": files_pb2.ExpiresAfter(anchor="created_at", seconds=3_600)},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_another_batch_under_the_key_is_a_conflict(
    client: Client, change: dict[str, Any]
) -> None:
    key = f"other {', '.join(change)} of {len(change)}"
    first = await create(client, key)
    with pytest.raises(ConflictError) as refused:
        await create(client, key, **change)
    assert refused.value.code == "idempotency_key_in_use"
    assert (await create(client, key)).id == first.id


async def test_the_same_upload_gives_the_same_file_and_leaves_one_copy(
    client: Client, store: StoreProcess
) -> None:
    content = chat_line("a") * 100
    first = await upload(client, "file", content)
    kept = store.blobs()
    again = await upload(client, "file", content, frame_bytes=1_000)
    assert again == first
    # The bytes of the second are dropped, of the first every one is there.
    await eventually(lambda: store.blobs() == kept)
    assert await client.download(first.id) == content


@pytest.mark.parametrize(
    "change",
    [
        {"content": chat_line("b")},
        {"filename": "out.jsonl"},
        {"purpose": "user_data"},
        {"seconds": 3_601},
        {"seconds": None},
    ],
    ids=str,
)
async def test_another_upload_under_the_key_is_a_conflict(
    client: Client, store: StoreProcess, change: dict[str, Any]
) -> None:
    key = f"file {change}"
    first = await upload(client, key, seconds=3_600)
    kept = store.blobs()
    with pytest.raises(ConflictError) as refused:
        await upload(client, key, **{"seconds": 3_600, **change})
    assert refused.value.code == "idempotency_key_in_use"
    await eventually(lambda: store.blobs() == kept)
    assert (await upload(client, key, seconds=3_600)).id == first.id


async def test_a_key_is_for_one_kind_of_object(client: Client) -> None:
    await upload(client, "kind")
    with pytest.raises(ConflictError):
        await create(client, "kind")


async def test_a_refused_request_leaves_its_key_free(client: Client) -> None:
    with pytest.raises(InvalidRequestError):
        await upload(client, "free", b"no json at all")
    with pytest.raises(InvalidRequestError):
        await create(client, "free", endpoint="/v1/bogus")
    assert (await create(client, "free")).id


async def test_an_object_that_is_gone_is_not_made_again(client: Client) -> None:
    file = await upload(client, "gone")
    request = files_pb2.DeleteFileRequest(file_id=file.id)
    await client.files.DeleteFile(request, metadata=client.metadata)
    with pytest.raises(ConflictError, match=file.id):
        await upload(client, "gone")


async def test_a_key_may_have_255_characters(client: Client) -> None:
    assert (await create(client, "k" * 255)).id
    with pytest.raises(InvalidRequestError, match="at most 255"):
        await create(client, "k" * 256)


async def test_a_race_makes_one_object(client: Client) -> None:
    batches = await asyncio.gather(*(create(client, "race") for _ in range(20)))
    assert len({batch.id for batch in batches}) == 1
    files = await asyncio.gather(*(upload(client, "file race") for _ in range(8)))
    assert len({file.id for file in files}) == 1


async def batches_of(client: Client) -> list[str]:
    """Return the ids of all batches."""
    page = common_pb2.PageRequest(limit=100)
    answer = await client.batches.ListBatches(
        batches_pb2.ListBatchesRequest(page=page), metadata=client.metadata
    )
    return [batch.id for batch in answer.batches]


async def test_a_store_killed_before_its_answer_makes_no_second_one(tmp_path: Path) -> None:
    async with running_store(tmp_path) as client:
        port = int(client.store.address.rpartition(":")[2])
        async with (
            TcpProxy(port) as proxy,
            rpc.open_channel(f"127.0.0.1:{proxy.port}") as channel,
        ):
            await channel.channel_ready()
            proxy.lose_answers = True
            call = batches_pb2_grpc.BatchesStub(channel).CreateBatch(
                batches_pb2.CreateBatchRequest(**BATCH), metadata=metadata(client, "killed")
            )
            sent = asyncio.ensure_future(call)
            # Committed, while its answer is lost on the way.
            (made,) = await eventually(lambda: batches_of(client))
            client.store.kill()
            proxy.cut()
            with pytest.raises(rpc.CallFault):
                await sent
        client.store.start()
        await client.ready()
        assert (await create(client, "killed")).id == made
        assert await batches_of(client) == [made]
        with pytest.raises(ConflictError):
            await create(client, "killed", endpoint="/v1/embeddings")


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'test.db'}")
    migrate.upgrade(database.writer_engine, 1)
    yield database
    database.close()


async def test_a_key_is_free_after_a_day_and_its_row_is_swept(db: Database) -> None:
    made: list[str] = []

    def once(connection: sa.Connection, key: str, request: str, now_ms: int) -> str:
        keyed = idempotency_repo.keyed(ids.DEFAULT_PROJECT, key, request)

        def make() -> Any:
            made.append(f"made-{len(made)}")
            return connection.execute(sa.select(sa.literal(made[-1]).label("id"))).one()

        def find(object_id: str) -> Any:
            return connection.execute(sa.select(sa.literal(object_id).label("id"))).one()

        row = idempotency_repo.once(connection, keyed, now_ms, make=make, find=find)
        return str(row.id)

    async def ask(key: str, request: str, now_ms: int) -> str:
        return await db.write(
            "test.step", lambda connection: once(connection, key, request, now_ms)
        )

    async def keys() -> list[str]:
        query = sa.select(idempotency_keys.c.key).order_by(idempotency_keys.c.key)
        return await db.read(lambda connection: list(connection.scalars(query)))

    assert await ask("k", "r", 0) == "made-0"
    assert await ask("k", "r", DAY_MS - 1) == "made-0"
    with pytest.raises(NightshiftError):
        await ask("k", "other", DAY_MS - 1)
    # Over, swept or not.
    assert await ask("k", "other", DAY_MS) == "made-1"
    assert await ask("l", "r", DAY_MS + 1) == "made-2"
    for now_ms, limit, gone, left in (
        (2 * DAY_MS - 1, 10, 0, ["k", "l"]),
        (2 * DAY_MS, 10, 1, ["l"]),
        (2 * DAY_MS + 1, 0, 0, ["l"]),
        (2 * DAY_MS + 1, 10, 1, []),
    ):
        swept = await db.write(
            "test.step",
            lambda connection, at=now_ms, limit=limit: idempotency_repo.forget_old(  # type: ignore[misc]
                connection, at, limit
            ),
        )
        assert (swept, await keys()) == (gone, left)


async def test_keys_of_projects_are_their_own(db: Database) -> None:
    def both(connection: sa.Connection) -> tuple[str, str]:
        connection.execute(projects.insert().values(id="q", created_at=1))
        found = []
        for number, project in enumerate((ids.DEFAULT_PROJECT, ProjectId("q"))):
            keyed = idempotency_repo.keyed(project, "k", "r")
            row = connection.execute(sa.select(sa.literal(f"o{number}").label("id"))).one()
            found.append(
                idempotency_repo.once(
                    connection, keyed, 0, make=lambda row=row: row, find=lambda _, row=row: row
                ).id
            )
        return found[0], found[1]

    assert await db.write("test.step", both) == ("o0", "o1")
