"""Rows of blobs: announced before they are written, live once a row names them.

A blob without a live row is garbage: the sweeper dooms what stayed pending too long, and only then
deletes it, so that a transaction which is about to name it fails instead of naming nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import sqlalchemy as sa

from services.kit.wire.errors import UnavailableError
from services.kit.wire.ids import ProjectId
from services.store.blobs import holds_repo
from services.store.tables.core import blobs

Doomed = tuple[str, int]
"""A blob's name, and when it was announced or, if it never was named, last doomed."""


_INSERT: Final = blobs.insert()


def announce(
    connection: sa.Connection, names: Sequence[str], project_id: ProjectId, now_ms: int
) -> None:
    """Record that these blobs are about to be written."""
    connection.execute(
        _INSERT,
        [
            {"name": name, "project_id": project_id, "state": "pending", "created_ms": now_ms}
            for name in names
        ],
    )


_MAKE_LIVE: Final = (
    blobs.update()
    .where(blobs.c.name == sa.bindparam("of_name"), blobs.c.state == "pending")
    .values(state="live")
)


def make_live(connection: sa.Connection, names: Sequence[str]) -> None:
    """Record, in the transaction that names them, that these blobs are in use.

    Raises:
        UnavailableError: one was swept meanwhile; the whole step is to be done again.
    """
    for name in names:
        moved = connection.execute(_MAKE_LIVE, {"of_name": name})
        if moved.rowcount != 1:
            raise UnavailableError("What was stored took too long and was dropped; try again.")


_DOOM: Final = blobs.update().where(blobs.c.name == sa.bindparam("of_name")).values(state="doomed")


def doom(connection: sa.Connection, names: Iterable[str]) -> None:
    """Record that nothing names these blobs any more; the sweeper deletes them."""
    # All in one go: a file may have ten thousand parts.
    of_names = [{"of_name": name} for name in names]
    if of_names:
        connection.execute(_DOOM, of_names)


def doom_announced(connection: sa.Connection, names: Sequence[str], now_ms: int) -> None:
    """Doom blobs that will not be named after all; those that a row names by now stay.

    One that was swept while its writer stood still is doomed anew: it was written after that, so it
    has to go once more. `forget` then leaves a row that somebody is about to forget, and one that
    was forgotten is there again.
    """
    # Another time than before in any case: it tells this doom from the one that was swept.
    again = sa.and_(blobs.c.state == "doomed", blobs.c.created_ms >= now_ms)
    anew = sa.case((again, blobs.c.created_ms + 1), else_=now_ms)
    connection.execute(
        blobs.update()
        .where(blobs.c.name.in_(names), blobs.c.state != "live")
        .values(state="doomed", created_ms=anew)
    )
    known = set(connection.scalars(sa.select(blobs.c.name).where(blobs.c.name.in_(names))))
    back = [
        {
            "name": name,
            "project_id": name.partition("/")[0],
            "state": "doomed",
            "created_ms": now_ms,
        }
        for name in names
        if name not in known
    ]
    if back:
        connection.execute(_INSERT, back)


def doom_abandoned(connection: sa.Connection, before_ms: int, now_ms: int) -> int:
    """Doom what was announced before `before_ms` and never named; return how many."""
    return connection.execute(
        blobs.update()
        .where(blobs.c.state == "pending", blobs.c.created_ms < before_ms)
        .values(state="doomed", created_ms=now_ms)
    ).rowcount


def deletable(
    connection: sa.Connection, after: str, limit: int, *, now_ms: int, late_ms: int
) -> list[Doomed]:
    """Return blobs to delete, by name; none while a hold stands.

    One statement: what it returns was doomed before any later hold was taken, so that no snapshot
    under that hold names it.

    Args:
        connection: in a transaction.
        after: only names after this one.
        limit: most names to return.
        now_ms: the store's time.
        late_ms: how long after a blob was announced, or given up unnamed, what was sent of it may
            still arrive: deleted before, it would come back and be nobody's.
    """
    doomed = (
        sa.select(blobs.c.name, blobs.c.created_ms)
        .where(
            blobs.c.state == "doomed",
            blobs.c.created_ms <= now_ms - late_ms,
            blobs.c.name > after,
            ~holds_repo.standing(now_ms),
        )
        .order_by(blobs.c.name)
    )
    return [(name, doomed_ms) for name, doomed_ms in connection.execute(doomed.limit(limit))]


def forget(connection: sa.Connection, deleted: Sequence[Doomed]) -> None:
    """Drop the rows of blobs that are deleted, but for those that were doomed anew meanwhile."""
    doomed = sa.tuple_(blobs.c.name, blobs.c.created_ms)
    connection.execute(blobs.delete().where(doomed.in_(deleted), blobs.c.state == "doomed"))
