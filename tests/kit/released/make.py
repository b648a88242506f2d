"""Makes the data of the schema that this code has; run once, when the schema is released.

    python -m tests.kit.released.make

It works for a while as clients, a scheduler and executors do, and stops in the midst of everything.
"""

import asyncio
import base64
import json
import sqlite3
import tempfile
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

from protos.nightshift.v1 import (
    admin_pb2,
    batches_pb2,
    files_pb2,
    models_pb2,
    work_pb2,
)
from services.kit.calls import rpc
from services.kit.wire import ids
from services.store.db import migrate
from services.store.webhooks.sender import Sender
from tests.integration.store_work import webhooks
from tests.integration.store_work.harness import Store, running
from tests.kit import uploads
from tests.kit.store import MODEL, POOL, chat_line

OTHER = ids.pool_id_of("other")
LONG_ANSWER = "x" * 100_000
_SKIPPED = frozenset({"alembic_version", "sqlite_sequence"})


async def work(store: Store) -> list[dict[str, Any]]:
    """Leave batches in every state; return what is to become of them: id, lines, end state."""
    models = [
        models_pb2.Model(id=MODEL, pool_id=POOL),
        models_pb2.Model(id="other", pool_id=OTHER),
    ]
    await store.admin.PutModels(admin_pb2.PutModelsRequest(models=models), metadata=store.metadata)
    ended = await _ended(store)
    await _files(store)
    await _key(store)
    going_on = [await _half_done(store), await _suspects(store), await _mixed(store)]
    # From here on no loop takes a turn but those that are called for.
    return [*ended, *going_on, *await _about_to_end(store)]


async def _ended(store: Store) -> list[dict[str, Any]]:
    async with Sender(allow_private=True) as sender:
        project = webhooks.Project(store, sender)
        # Nobody listens there: the deliveries wait.
        await project.endpoint("http://127.0.0.1:1/hook")
        found = []
        for end, state, lines in (
            (webhooks.complete, "completed", 1),
            (webhooks.fail, "failed", 0),
            (webhooks.expire, "expired", 1),
            (webhooks.cancel, "cancelled", 1),
        ):
            found.append({"id": await end(store), "lines": lines, "ends": state})
        await project.turn()
    return found


async def _files(store: Store) -> None:
    content = b"".join(chat_line(f"u{number}") for number in range(4))
    begun = await uploads.create(store, 2 * len(content))
    await uploads.add(store, begun.id, content)
    whole = await uploads.create(store, len(content))
    part = await uploads.add(store, whole.id, content)
    await uploads.complete(store, whole.id, [part])
    for deleted in (await store.upload(content), await store.upload(content + b"\n")):
        await store.files.DeleteFile(
            files_pb2.DeleteFileRequest(file_id=deleted.id), metadata=store.metadata
        )
        await store.sweeper.run_once()


async def _key(store: Store) -> None:
    await store.admin.CreateKey(
        admin_pb2.CreateKeyRequest(project_id="research", name="nightly", requests_per_minute=600),
        metadata=store.metadata,
    )


async def _half_done(store: Store) -> dict[str, Any]:
    """Lines 0-3 are in a blob, 5 in a row, 4 and 6 in an engine, 7 and 8 on the way."""
    batch_id = await store.batch(12)
    one, two, _ = await store.cut((batch_id, 4), (batch_id, 3), (batch_id, 2))
    first = await store.open(one)
    await store.finish(first.token, range(4), batch_id, failed=[1], answer=LONG_ANSWER)
    second = await store.open(two, "e1")
    await store.finish(second.token, [5], batch_id)
    await store.beat({second.token: [(4, 1), (6, 1)]}, "e1")
    return {"id": batch_id, "lines": 12, "ends": "completed"}


async def _suspects(store: Store) -> dict[str, Any]:
    """Two lines that an engine died with wait to run apart."""
    batch_id = await store.batch(6)
    (chunk,) = await store.cut((batch_id, 6))
    opened = await store.open(chunk)
    await store.finish(opened.token, [0], batch_id)
    await store.beat({opened.token: [(1, 2)]})
    await store.died({opened.token: [(1, 2)]})
    return {"id": batch_id, "lines": 6, "ends": "completed"}


async def _mixed(store: Store) -> dict[str, Any]:
    """Of two models, one of which is cut to its end."""
    names = (MODEL, "other", MODEL, "other", "other")
    batch_id = await store.batch([chat_line(f"r{n}", model=name) for n, name in enumerate(names)])
    await store.lead()
    cuts = [work_pb2.Cut(batch_id=batch_id, pool_id=POOL, max_lines=9, max_bytes=1 << 30)]
    await store.work.CutChunks(
        work_pb2.CutChunksRequest(term=store.term, cuts=cuts), metadata=store.metadata
    )
    return {"id": batch_id, "lines": 5, "ends": "completed"}


async def _about_to_end(store: Store) -> list[dict[str, Any]]:
    stopping, sealed, done = (await store.batch(3), await store.batch(2), await store.batch(2))
    chunks = await store.cut((stopping, 3), (sealed, 2), (done, 1))
    opened = [await store.open(chunk) for chunk in chunks]
    await store.finish(opened[0].token, [0], stopping)
    # Cancelled while an executor has it; sealed by its last line; with its first line only.
    await store.cancel(stopping)
    await store.finish(opened[1].token, [0, 1], sealed)
    await store.finish(opened[2].token, [0], done)
    file = await store.upload(chat_line("r0") + chat_line("r1"))
    answer = await store.batches.CreateBatch(
        batches_pb2.CreateBatchRequest(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            completion_window_seconds=86_400,
        ),
        metadata=(*store.metadata, (rpc.IDEMPOTENCY_KEY, "once")),
    )
    return [
        {"id": stopping, "lines": 3, "ends": "cancelled"},
        {"id": sealed, "lines": 2, "ends": "completed"},
        {"id": done, "lines": 2, "ends": "completed"},
        {"id": answer.batch.id, "lines": 2, "ends": "completed"},
    ]


# --- writing it down ------------------------------------------------------------------------------


def dumped(folder: Path, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Return all that stands in a data directory, ready for JSON."""
    with closing(sqlite3.connect(folder / "nightshift.db")) as connection:
        made = connection.execute(
            "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
        ).fetchall()
        names = [
            name for name, sql in made if sql.startswith("CREATE TABLE") and name not in _SKIPPED
        ]
        tables = {name: _rows(connection, name) for name in names}
    blobs = {
        str(path.relative_to(folder / "blobs")): _text(zlib.compress(path.read_bytes(), 9))
        for path in sorted((folder / "blobs").rglob("*"))
        if path.is_file()
    }
    schema = {name: sql for name, sql in made if not name.startswith("sqlite_")}
    return {"schema": schema, "batches": batches, "tables": tables, "blobs": blobs}


def _rows(connection: sqlite3.Connection, table: str) -> dict[str, Any]:
    cursor = connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2")
    rows = [[_value(value) for value in row] for row in cursor]
    return {"columns": [column[0] for column in cursor.description], "rows": rows}


def _value(value: Any) -> Any:
    return {"zlib": _text(zlib.compress(value, 9))} if isinstance(value, bytes) else value


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


async def main() -> None:
    """Make the file of this schema, unless it was."""
    to = Path(__file__).with_name(f"{migrate.HEAD}.json")
    assert not to.exists(), f"{to} was made when that schema was released, and stays as it is"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with running(folder, mixed_models=True, webhooks_allow_private=True) as store:
            batches = await work(store)
        said = dumped(folder, batches)
    parts = (f'"{name}":{json.dumps(part, separators=(",", ":"))}' for name, part in said.items())
    to.write_text("{" + ",\n".join(parts) + "}\n")
    print(f"{to}: {to.stat().st_size} bytes")


if __name__ == "__main__":
    asyncio.run(main())
