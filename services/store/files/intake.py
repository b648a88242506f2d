"""What takes content in has in common: frames that come in time, blobs that are announced first."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TypeVar

from services.kit.wire.errors import InvalidRequestError
from services.kit.wire.ids import ProjectId
from services.store.admin import quota_repo
from services.store.blobs import blobs_repo
from services.store.context import Context

IDLE_SECONDS = 60.0
"""A client that sends nothing for this long has gone."""

Frame = TypeVar("Frame")


async def next_frame(requests: AsyncIterator[Frame]) -> Frame | None:
    """Return a stream's next frame; None at its end.

    Raises:
        InvalidRequestError: none came for too long.
    """
    try:
        async with asyncio.timeout(IDLE_SECONDS):
            return await anext(requests, None)
    except TimeoutError:
        raise InvalidRequestError(
            f"Nothing was received for {IDLE_SECONDS:.0f} seconds; upload it again."
        ) from None


async def room_for(context: Context, project_id: ProjectId) -> quota_repo.Quota:
    """Return what a project may still keep, before its bytes are sent.

    Raises:
        UnavailableError: the store's disk takes nothing new.
    """
    await context.disk.require_room()
    now_at = context.now_ms() // 1000
    default = context.settings.project_quota_bytes
    return await context.db.read(
        lambda connection: quota_repo.quota(connection, project_id, default, now_at)
    )


async def announce(context: Context, project_id: ProjectId, kind: str) -> str:
    """Return the name of a new blob, which is announced and may be written."""
    name = context.blob_name(project_id, kind)
    now_ms = context.now_ms()
    await context.db.write(
        "blob.announce",
        lambda connection: blobs_repo.announce(connection, [name], project_id, now_ms),
    )
    return name


def give_up(context: Context, names: Sequence[str]) -> None:
    """Have the sweeper delete blobs that were announced and are named by no row.

    Returns at once: who gives up may be cancelled. The writer works in order, so that blobs whose
    row was on its way are live by then, and stay.
    """
    now_ms = context.now_ms()
    task = asyncio.ensure_future(
        context.db.write(
            "blob.give_up", lambda connection: blobs_repo.doom_announced(connection, names, now_ms)
        )
    )
    # Whatever fails here, the sweeper finds what stayed announced for too long.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    context.wake("sweeper")


async def in_turn(pieces: Iterable[bytes | memoryview]) -> AsyncIterator[bytes | memoryview]:
    """Yield pieces as a blob's content, so that they need not be one."""
    for piece in pieces:
        yield piece
