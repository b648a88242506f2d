"""No turn of a loop and no call about work looks at all that ever was: SQLite says how it would."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import files_pb2
from tests.integration.store_work.harness import Store
from tests.kit import uploads
from tests.kit.store import chat_line

pytestmark = pytest.mark.integration

# Tables that grow with the years, or with what runs.
LARGE = {
    "attempts",
    "batch_engines",
    "batch_models",
    "batches",
    "bit_blocks",
    "blobs",
    "chunks",
    "deliveries",
    "files",
    "idempotency_keys",
    "segments",
    "upload_parts",
    "uploads",
}
# Indexes of what is open or waits, which is as much as there is to do.
OPEN = re.compile(
    r"ix_(batches_(open|window|expiry|stopping|finalize|clear)|batch_models_uncut|chunks_open"
    r"|attempts_open|attempts_open_of_batch|deliveries_pending|uploads_pending)"
)


class Plans:
    """What SQLite would do for each statement, by who runs it: the writer or a reader."""

    def __init__(self) -> None:
        self.scans: set[tuple[str, str]] = set()
        self.seen = 0

    def watch(self, engine: sa.Engine, who: str) -> None:
        """Ask for the plan of all that `engine` runs."""

        @sa.event.listens_for(engine, "before_cursor_execute")
        def ask(
            _connection: Any, cursor: Any, statement: str, values: Any, _context: Any, many: bool
        ) -> None:
            if not statement.startswith(("SELECT", "UPDATE", "DELETE")):
                return
            self.seen += 1
            asked = cursor.connection.execute(
                f"EXPLAIN QUERY PLAN {statement}", values[0] if many else values
            )
            for *_, step in asked.fetchall():
                found = re.match(r"SCAN (\w+)( USING.*)?$", step)
                if found and found[1] in LARGE and not OPEN.search(found[2] or ""):
                    self.scans.add((who, step))


@pytest.fixture
def plans(store: Store) -> Iterator[Plans]:
    db = store.context.db
    found = Plans()
    found.watch(db._writer_engine, "writer")
    found.watch(db._reader_engine, "reader")
    yield found
    assert found.seen > 100


async def test_what_runs_looks_at_what_is_open(store: Store, plans: Plans) -> None:
    batch_id, late = await store.batch(4), await store.batch(1, window_seconds=60)
    gone = await store.upload(chat_line("r0"))
    await store.files.DeleteFile(
        files_pb2.DeleteFileRequest(file_id=gone.id), metadata=store.metadata
    )
    upload = await uploads.create(store, len(chat_line("r0")))
    await uploads.add(store, upload.id, chat_line("r0"))
    await store.lead()
    await store.window()
    (first, second) = await store.cut((batch_id, 2), (batch_id, 2))
    token = (await store.open(first)).token
    await store.beat({token: [(0, 1)]})
    await store.died({token: [(0, 1)]})
    await store.reclaim()
    other = (await store.open(second)).token
    await store.lines(other, [(2, 1)])
    await store.finish(other, [2], batch_id)
    await store.hand_back(other)
    await store.cancel(batch_id)
    store.clock.advance(3_601)
    for _ in range(2):
        await store.turn()
        await store.sweeper.run_once()
    await store.hub.run_once()
    await store.get(late)
    # A reader holds nobody up, and asks for files that are gone once a minute.
    assert plans.scans <= {("reader", "SCAN files")}
