"""Creation and validation of batches through the store's gRPC door."""

from collections.abc import AsyncIterator, Iterator

import pytest

from protos.nightshift.v1 import (
    admin_pb2,
    batches_pb2,
    common_pb2,
    models_pb2,
)
from services.kit.wire.errors import ConflictError, InvalidRequestError, NotFoundError
from tests.kit.store import (
    MODEL,
    POOL,
    Client,
    StoreProcess,
    chat_line,
    client_of,
    our_errors,
    refused,
    store_process,
)

FAILED = batches_pb2.BATCH_STATUS_FAILED
RUNNING = batches_pb2.BATCH_STATUS_IN_PROGRESS


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with store_process(
        tmp_path_factory.mktemp("store"), {"NIGHTSHIFT_STORE_MAX_BATCH_LINES": "40"}
    ) as process:
        yield process


@pytest.fixture
async def client(store: StoreProcess) -> AsyncIterator[Client]:
    async with client_of(store) as client:
        yield client


async def test_a_sound_input_runs(client: Client) -> None:
    file = await client.upload(chat_line("a") + b"\r\n  \n" + chat_line("b"))

    batch = await client.create(file.id)
    assert batch.status == batches_pb2.BATCH_STATUS_VALIDATING
    assert batch.expires_at - batch.created_at == 86_400
    assert batch.request_counts == batches_pb2.RequestCounts()

    running = await client.settled(batch.id, RUNNING)
    assert running.request_counts.total == 2
    assert running.model == MODEL
    assert running.in_progress_at >= running.created_at


async def test_a_faulty_input_fails_naming_its_physical_lines(client: Client) -> None:
    content = chat_line("a") + b"\n" + b"{oops\n" + chat_line("a") + chat_line("b", model="nobody")
    batch = await client.create((await client.upload(content)).id)

    failed = await client.settled(batch.id, FAILED)
    assert [(error.code, error.line) for error in failed.errors] == [
        ("invalid_json_line", 3),
        ("duplicate_custom_id", 4),
        ("model_not_found", 5),
    ]
    assert not failed.HasField("in_progress_at")
    assert failed.request_counts == batches_pb2.RequestCounts()
    assert failed.failed_at


async def test_too_many_lines_fail_without_naming_one(client: Client) -> None:
    lines = [chat_line(f"r{number}") for number in range(41)]
    most = await client.create((await client.upload(b"".join(lines[:40]))).id)
    more = await client.create((await client.upload(b"".join(lines))).id)

    assert (await client.settled(most.id, RUNNING)).request_counts.total == 40
    failed = await client.settled(more.id, FAILED)
    assert [(error.code, error.HasField("line")) for error in failed.errors] == [
        ("too_many_tasks", False)
    ]


async def test_a_file_that_is_not_to_be_had_fails_the_batch(client: Client) -> None:
    unknown = await client.create("file-unknown")
    notes = await client.create((await client.upload(b"notes", purpose="user_data")).id)
    other = Client(client.store, project_id="other")
    foreign = await client.create((await client.upload(chat_line("r1"))).id)
    await other.channel.close()

    failed = await client.settled(unknown.id, FAILED)
    assert [(error.code, error.param) for error in failed.errors] == [
        ("invalid_request", "file_id")
    ]
    assert failed.errors[0].message.startswith("Cannot find file file-unknown")
    assert "user_data" in (await client.settled(notes.id, FAILED)).errors[0].message
    await client.settled(foreign.id, RUNNING)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/bogus"}, "endpoint"),
        ({"completion_window_seconds": 0}, "completion_window"),
    ],
)
async def test_parameters_are_judged_at_once(
    client: Client, changes: dict[str, object], param: str
) -> None:
    request = batches_pb2.CreateBatchRequest(
        input_file_id="file-x",
        endpoint="/v1/chat/completions",
        completion_window="24h",
        completion_window_seconds=60,
    )
    request.MergeFrom(batches_pb2.CreateBatchRequest(**changes))
    if "completion_window_seconds" in changes:
        request.completion_window_seconds = 0
    with pytest.raises(InvalidRequestError) as error, our_errors():
        await client.batches.CreateBatch(request, metadata=client.metadata)
    assert refused(error) == (400, "invalid_value", param)


async def test_lists_are_newest_first_and_pages_are_exact(client: Client) -> None:
    async def page(limit: int, after: str = "") -> tuple[list[str], bool]:
        with our_errors():
            answer = await client.batches.ListBatches(
                batches_pb2.ListBatchesRequest(
                    page=common_pb2.PageRequest(limit=limit, after=after)
                ),
                metadata=client.metadata,
            )
        return [batch.id for batch in answer.batches], answer.has_more

    earlier, _ = await page(100)
    made = [(await client.create("file-unknown")).id for _ in range(5)]
    everything = made[::-1] + earlier

    assert await page(2) == (everything[:2], True)
    assert await page(2, made[3]) == (everything[2:4], True)
    assert await page(100, made[1]) == (everything[4:], False)
    assert await page(len(everything)) == (everything, False)
    assert await page(len(everything) - 1) == (everything[:-1], True)
    with pytest.raises(InvalidRequestError) as error:
        await page(101)
    assert refused(error) == (400, "integer_above_max_value", "limit")
    with pytest.raises(NotFoundError):
        await page(2, "batch_none")


async def test_metadata_is_echoed_and_absence_is_told_from_emptiness(client: Client) -> None:
    async def create(**given: object) -> batches_pb2.Batch:
        answer = await client.batches.CreateBatch(
            batches_pb2.CreateBatchRequest(
                input_file_id="f",
                endpoint="/v1/embeddings",
                completion_window="24h",
                completion_window_seconds=60,
                **given,
            ),
            metadata=client.metadata,
        )
        return answer.batch

    named = await create(metadata={"team": "évals"}, has_metadata=True)
    assert dict((await client.get(named.id)).metadata) == {"team": "évals"}
    assert not (await client.get((await create()).id)).has_metadata
    assert (await client.get((await create(has_metadata=True)).id)).has_metadata


async def test_an_acknowledged_batch_survives_a_crash_while_validating(client: Client) -> None:
    file = await client.upload(chat_line("r1"))
    batch = await client.create(file.id)
    client.store.kill()
    client.store.start()

    assert (await client.settled(batch.id, RUNNING)).input_file_id == file.id


async def test_cancel_of_what_has_failed_is_a_conflict(client: Client) -> None:
    batch = await client.create("file-unknown")
    await client.settled(batch.id, FAILED)

    with pytest.raises(ConflictError, match="status 'failed'") as error, our_errors():
        await client.batches.CancelBatch(
            batches_pb2.CancelBatchRequest(batch_id=batch.id), metadata=client.metadata
        )
    assert refused(error) == (409, None, None)


async def test_models_are_rows_until_they_are_removed(client: Client) -> None:
    async def names() -> list[str]:
        answer = await client.models.ListModels(
            models_pb2.ListModelsRequest(), metadata=client.metadata
        )
        return [model.id for model in answer.models]

    put = admin_pb2.PutModelsRequest(
        models=[models_pb2.Model(id="alias", pool_id=POOL, endpoints=["/v1/embeddings"])]
    )
    for _ in range(2):
        await client.admin.PutModels(put, metadata=client.metadata)
    assert await names() == ["alias", MODEL]
    moved = admin_pb2.PutModelsRequest(models=[models_pb2.Model(id="alias", pool_id="elsewhere")])
    with pytest.raises(ConflictError, match="models remove alias"), our_errors():
        await client.admin.PutModels(moved, metadata=client.metadata)

    # A line for an endpoint that the model's pool does not serve is found while validating.
    batch = await client.create((await client.upload(chat_line("r1", model="alias"))).id)
    await client.settled(batch.id, FAILED)

    gone = admin_pb2.DeleteModelRequest(model_id="alias")
    await client.admin.DeleteModel(gone, metadata=client.metadata)
    assert await names() == [MODEL]
    with pytest.raises(NotFoundError), our_errors():
        await client.admin.DeleteModel(gone, metadata=client.metadata)
