"""Text that databases treat differently: it is kept, found and told alike on both."""

import orjson
import pytest

from protos.nightshift.v1 import (
    admin_pb2,
    batches_pb2,
    common_pb2,
    files_pb2,
    models_pb2,
    uploads_pb2,
    work_pb2,
)
from services.kit.wire.errors import InvalidRequestError, NotFoundError
from tests.integration.store_work.harness import Store
from tests.kit.store import DAY_SECONDS, chat_line, our_errors

ODD = "a\x00b\ue000ä\U0001f600'\"%s\\"


async def test_names_and_metadata_come_back_as_they_were(store: Store) -> None:
    file = await store.upload(chat_line("r0"), filename=ODD)
    assert file.filename == ODD
    with our_errors():
        made = await store.batches.CreateBatch(
            batches_pb2.CreateBatchRequest(
                input_file_id=file.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
                completion_window_seconds=DAY_SECONDS,
                metadata={ODD: ODD},
                has_metadata=True,
            ),
            metadata=store.metadata,
        )
    assert dict((await store.get(made.batch.id)).metadata) == {ODD: ODD}


async def test_a_faulty_custom_id_is_quoted(store: Store) -> None:
    line = orjson.loads(chat_line("r0"))
    line["custom_id"] = ODD
    text = orjson.dumps(line) + b"\n"
    file = await store.upload(text + text)
    batch = await store.create(file.id)
    await store.validated(batch.id)
    found = await store.get(batch.id)
    assert found.status == batches_pb2.BATCH_STATUS_FAILED
    # What nobody would see is shown as an escape.
    shown = ODD.replace("\x00", "\\x00").replace("\ue000", "\\ue000")
    assert f"'{shown}'" in found.errors[0].message


@pytest.mark.parametrize("odd", [ODD, "x" * 500])
async def test_what_nothing_is_called_is_not_found(store: Store, odd: str) -> None:
    page = common_pb2.PageRequest(after=odd)
    for call, request in (
        (store.files.GetFile, files_pb2.GetFileRequest(file_id=odd)),
        (store.files.DeleteFile, files_pb2.DeleteFileRequest(file_id=odd)),
        (store.files.ListFiles, files_pb2.ListFilesRequest(page=page)),
        (store.batches.GetBatch, batches_pb2.GetBatchRequest(batch_id=odd)),
        (store.batches.CancelBatch, batches_pb2.CancelBatchRequest(batch_id=odd)),
        (store.batches.ListBatches, batches_pb2.ListBatchesRequest(page=page)),
        (store.uploads.CancelUpload, uploads_pb2.CancelUploadRequest(upload_id=odd)),
        (store.models.GetModel, models_pb2.GetModelRequest(model_id=odd)),
    ):
        with pytest.raises(NotFoundError), our_errors():
            await call(request, metadata=store.metadata)


async def test_a_file_that_does_not_exist_fails_the_batch(store: Store) -> None:
    batch = await store.create(ODD)
    await store.validated(batch.id)
    found = await store.get(batch.id)
    assert found.status == batches_pb2.BATCH_STATUS_FAILED
    assert found.input_file_id == ODD


@pytest.mark.parametrize("pool_id", [ODD, "a.b", "a b", "*", ">", "x" * 65])
async def test_no_pool_has_an_id_that_no_subject_can_hold(store: Store, pool_id: str) -> None:
    """One event that cannot be published would keep all later ones from being told."""
    executor = work_pb2.RegisterExecutorRequest(
        executor_id="e1", incarnation="i1", pool_id=pool_id, models=["odd"]
    )
    with pytest.raises(InvalidRequestError), our_errors():
        await store.work.RegisterExecutor(executor, metadata=store.metadata)
    model = models_pb2.Model(id="odd", pool_id=pool_id)
    with pytest.raises(InvalidRequestError), our_errors():
        await store.admin.PutModels(
            admin_pb2.PutModelsRequest(models=[model]), metadata=store.metadata
        )
