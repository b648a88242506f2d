"""Batches that run and lack what is stored of them, or cannot read it: they wait, and say why.

What is missing may be put back, and what a disk refuses may be given after all, so that nothing is
given up here. Such a batch is handed out no more for a while, a growing one, as a whole: one try
tells of all its chunks. What ends it is what ends any batch, a cancel or its time.
"""

from typing import Any, Final

import sqlalchemy as sa

from services.kit.process.log import get_logger
from services.kit.wire.errors import ConflictError, LostError, NightshiftError, UnavailableError
from services.store.blobs.base import BlobMissingError, BlobTrouble, BlobUnreadableError
from services.store.context import Context
from services.store.domain.retry_budget import fault_wait_ms
from services.store.domain.state import BatchStatus
from services.store.tables.core import attempts, batches, blobs, chunks
from services.store.work import attempts_repo, chunks_repo
from services.store.work.attempts_repo import Outcome

_log = get_logger(__name__)

Row = sa.Row[*tuple[Any, ...]]

_MOST_TRIES: Final = 10
_UNSEALED: Final = (BatchStatus.IN_PROGRESS.value, BatchStatus.CANCELLING.value)


def is_lost(connection: sa.Connection, error: BlobTrouble) -> bool:
    """Tell whether a blob that was not found should be there; else it was dropped meanwhile."""
    state = connection.scalar(sa.select(blobs.c.state).where(blobs.c.name == error.name))
    return state == "live"


def content_lost(file_id: str, *, of_batch: bool) -> LostError:
    """Return what is told to who asks for the content of a file that is lost."""
    mend = "run its batch's input again" if of_batch else "upload it again"
    return LostError(
        f"The content of file {file_id} is missing from the server's storage or damaged. Asking "
        "again does not help until the operator has put it back, which `nightshift doctor --check` "
        f"helps with; without that, delete this file and {mend}.",
        code="content_lost",
        param="id",
    )


def input_words(file_id: str, error: BlobTrouble) -> str:
    """Say what a batch that runs waits for."""
    if isinstance(error, BlobUnreadableError):
        return (
            f"the content of its input file {file_id} cannot be read from the server's storage: "
            f"{error.why} (blob {error.name}). It is tried again, at least every five minutes, and "
            "the batch goes on once it can be read. Where that disk never gives it back, the "
            "operator moves the blob away, and it counts as lost"
        )
    return (
        f"the content of its input file {file_id} is missing from the server's storage or damaged "
        f"(blob {error.name}). It is looked for again, at least every five minutes, in case the "
        "operator puts it back, which `nightshift doctor --check` helps with; without that, cancel "
        "this batch and upload the file again: what is finished is in its output file then"
    )


async def put_off(
    context: Context, batch_id: str, missing: BlobTrouble, *, token: str = ""
) -> NightshiftError:
    """Hand out nothing of a batch for a while, since its input lacks a blob; tell why in its row.

    Args:
        context: the store's.
        batch_id: of a batch that runs.
        missing: what was not found, or not read.
        token: of the attempt whose lines could not be read, which is closed.

    Returns:
        What to tell who wanted to read it.
    """

    def note(connection: sa.Connection) -> NightshiftError:
        if not is_lost(connection, missing):
            return UnavailableError("This input is being moved; try again.")
        now_ms = context.now_ms()
        words = _put_off(connection, batch_id, missing, now_ms)
        if words is None or (token and not _close(connection, token, now_ms)):
            return ConflictError("This attempt is over.")
        # An executor holds nothing of it either way, and asks no more.
        return LostError(words, code="input_lost")

    return await context.db.write("batch.put_off", note)


def _put_off(
    connection: sa.Connection, batch_id: str, error: BlobTrouble, now_ms: int
) -> str | None:
    """Return why; None where the batch takes no results any more."""
    row = connection.execute(
        sa.select(batches).where(batches.c.id == batch_id).with_for_update()
    ).first()
    if row is None or row.sealed_ms is not None or row.status not in _UNSEALED:
        return None
    words = input_words(row.input_file_id, error)
    if row.retry_ms > now_ms:
        # Another chunk has told already.
        return words
    tries = min(row.tries + 1, _MOST_TRIES)
    told = "input_missing" if isinstance(error, BlobMissingError) else "input_unreadable"
    _log.error(told, batch=batch_id, file=row.input_file_id, blob=error.name)
    connection.execute(
        batches.update()
        .where(batches.c.id == batch_id)
        .values(fault=words, tries=tries, retry_ms=now_ms + fault_wait_ms(tries))
    )
    return words


def _close(connection: sa.Connection, token: str, now_ms: int) -> bool:
    """Close an attempt as if it were handed back; tell whether it was open."""
    row = connection.execute(
        sa.select(attempts.c.chunk_id, attempts.c.dispatch, chunks.c.alone)
        .join(chunks, chunks.c.id == attempts.c.chunk_id)
        .where(attempts.c.token == token, attempts.c.closed_ms.is_(None))
    ).first()
    if row is None:
        return False
    attempts_repo.close(connection, [token], Outcome.HANDED_BACK, now_ms)
    chunks_repo.give_up(connection, row.chunk_id, row.dispatch)
    if row.alone:
        # Others of its pool that have to run alone need not wait for it.
        chunks_repo.queue_again(connection, row.chunk_id, row.dispatch)
    return True


async def found_again(context: Context, batch_id: str) -> None:
    """Let a batch run as if nothing had been missing."""
    now_ms = context.now_ms()
    await context.db.write(
        "batch.found_again", lambda connection: _found(connection, batch_id, now_ms)
    )


def _found(connection: sa.Connection, batch_id: str, now_ms: int) -> None:
    connection.execute(
        batches.update()
        .where(
            batches.c.id == batch_id,
            batches.c.status == BatchStatus.IN_PROGRESS.value,
            batches.c.fault.is_not(None),
            # What was begun before a batch was held for its engine deaths reads on, and ends no
            # hold.
            sa.or_(batches.c.tries > 0, batches.c.retry_ms <= now_ms),
        )
        .values(fault=None, tries=0, retry_ms=0)
    )
