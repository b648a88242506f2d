"""The same request under the same key makes one object, for a day.

The row is written by the transaction that creates the object, so that a client that never heard the
answer may ask again whatever died in between.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import orjson
import sqlalchemy as sa

from services.kit.wire.errors import ConflictError, InvalidRequestError, NotFoundError
from services.kit.wire.ids import ProjectId
from services.store.tables.keys import idempotency_keys

Row = sa.Row[Any]

KEPT_SECONDS: Final = 24 * 3_600
MAX_CHARACTERS: Final = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyed:
    """A request that carries a key.

    Attributes:
        project_id: keys of others are others' keys.
        key: as the client sent it.
        fingerprint: of all that makes the request what it is.
    """

    project_id: ProjectId
    key: str
    fingerprint: str


def keyed(project_id: ProjectId, key: str, *request: object) -> Keyed | None:
    """Return a request as it is told from others; None where it carries no key.

    Args:
        project_id: whose request it is.
        key: empty where the client sent none.
        request: its kind and all its values, as JSON has them.

    Raises:
        InvalidRequestError: the key is too long.
    """
    if not key:
        return None
    if len(key) > MAX_CHARACTERS:
        raise InvalidRequestError(
            f"An idempotency key has at most {MAX_CHARACTERS} characters, not {len(key)}."
        )
    told = orjson.dumps(request, option=orjson.OPT_SORT_KEYS)
    return Keyed(project_id=project_id, key=key, fingerprint=hashlib.sha256(told).hexdigest())


def once(
    connection: sa.Connection,
    request: Keyed | None,
    now_ms: int,
    *,
    make: Callable[[], Row],
    find: Callable[[str], Row],
) -> Row:
    """Make an object, or find the one that an equal request has made.

    Args:
        connection: in the transaction that creates.
        request: None where it carries no key: it then always makes.
        now_ms: the store's time.
        make: inserts the object and returns its row, which has an `id`.
        find: returns the row of an id.

    Raises:
        ConflictError: the key has been used for another request, or its object is gone.
    """
    if request is None:
        return make()
    where = (
        idempotency_keys.c.project_id == request.project_id,
        idempotency_keys.c.key == request.key,
    )
    earlier = connection.execute(sa.select(idempotency_keys).where(*where)).first()
    if earlier is not None and earlier.created_ms > now_ms - KEPT_SECONDS * 1000:
        return _made_before(earlier, request, find)
    if earlier is not None:
        connection.execute(idempotency_keys.delete().where(*where))
    row = make()
    connection.execute(
        idempotency_keys.insert().values(
            project_id=request.project_id,
            key=request.key,
            fingerprint=request.fingerprint,
            object_id=row.id,
            created_ms=now_ms,
        )
    )
    return row


def _made_before(earlier: Row, request: Keyed, find: Callable[[str], Row]) -> Row:
    if earlier.fingerprint != request.fingerprint:
        raise ConflictError(
            "This Idempotency-Key was used for a different request in the last 24 hours; "
            "send a new key with it.",
            code="idempotency_key_in_use",
        )
    try:
        return find(earlier.object_id)
    except NotFoundError:
        raise ConflictError(
            f"This Idempotency-Key made {earlier.object_id}, which has been deleted since; "
            "send a new key to create it again.",
            code="idempotency_key_in_use",
        ) from None


def forget_old(connection: sa.Connection, now_ms: int, limit: int) -> int:
    """Delete up to `limit` rows whose day is over; return how many went."""
    old = (
        sa.select(idempotency_keys.c.project_id, idempotency_keys.c.key)
        .where(idempotency_keys.c.created_ms <= now_ms - KEPT_SECONDS * 1000)
        .order_by(idempotency_keys.c.created_ms)
        .limit(limit)
    )
    both = sa.tuple_(idempotency_keys.c.project_id, idempotency_keys.c.key)
    return connection.execute(idempotency_keys.delete().where(both.in_(old))).rowcount
