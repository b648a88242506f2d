"""Statements on API keys and the projects that they make."""

import re
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from protos.nightshift.v1 import admin_pb2
from services.kit.wire.api_keys import START
from services.kit.wire.errors import InvalidRequestError, NotFoundError
from services.kit.wire.ids import ProjectId
from services.store.context import next_seq
from services.store.tables.core import projects
from services.store.tables.keys import api_keys

Row = sa.Row[Any]

MAX_NAME_CHARACTERS: Final = 100
MAX_REQUESTS_PER_MINUTE: Final = 10_000_000

# Project names are part of blobs' names, so that nothing else may be let in.
_PROJECT: Final = re.compile(r"[a-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """What a key's row is made of; the key itself is not."""

    id: str
    project_id: ProjectId
    name: str
    sha256: str
    prefix: str
    last_four: str
    requests_per_minute: int | None


def project_of(name: str) -> ProjectId:
    """Return a project's name where it can be one.

    Raises:
        InvalidRequestError: it cannot.
    """
    if _PROJECT.fullmatch(name) is None:
        raise InvalidRequestError(
            f"A project's name is 1 to 64 of a-z, 0-9, '_' and '-', not {name[:100]!r}.",
            param="project_id",
        )
    return ProjectId(name)


def check_new(request: admin_pb2.CreateKeyRequest) -> None:
    """Refuse what no key can have.

    Raises:
        InvalidRequestError: always for such a request.
    """
    project_of(request.project_id)
    if len(request.name) > MAX_NAME_CHARACTERS or not request.name.isprintable():
        raise InvalidRequestError(
            f"A key's name has at most {MAX_NAME_CHARACTERS} printable characters.", param="name"
        )
    limited = request.HasField("requests_per_minute")
    if limited and not 1 <= request.requests_per_minute <= MAX_REQUESTS_PER_MINUTE:
        raise InvalidRequestError(
            f"A key may call 1 to {MAX_REQUESTS_PER_MINUTE} times a minute; leave the limit away "
            "for a key without one.",
            param="requests_per_minute",
        )


def insert(connection: sa.Connection, key: NewKey, now_at: int) -> Row:
    """Insert a key, and its project where it is new."""
    known = sa.select(projects.c.id).where(projects.c.id == key.project_id)
    if connection.scalar(known) is None:
        connection.execute(projects.insert().values(id=key.project_id, created_at=now_at))
    connection.execute(
        api_keys.insert().values(
            id=key.id,
            seq=next_seq(connection),
            project_id=key.project_id,
            name=key.name,
            sha256=key.sha256,
            prefix=key.prefix,
            last_four=key.last_four,
            requests_per_minute=key.requests_per_minute,
            created_at=now_at,
        )
    )
    return connection.execute(sa.select(api_keys).where(api_keys.c.id == key.id)).one()


def list_all(connection: sa.Connection, project_id: str) -> list[Row]:
    """Return all keys of a project, or of all where it is empty, oldest first."""
    query = sa.select(api_keys).order_by(api_keys.c.seq)
    if project_id:
        query = query.where(api_keys.c.project_id == project_id)
    return list(connection.execute(query))


def revoke(connection: sa.Connection, key_id: str, project_id: str, now_at: int) -> Row:
    """End a key; repeatable.

    Raises:
        NotFoundError: unknown, or not of the project that is named.
    """
    wanted = api_keys.c.id == key_id
    if project_id:
        wanted &= api_keys.c.project_id == project_id
    connection.execute(
        api_keys.update().where(wanted, api_keys.c.revoked_at.is_(None)).values(revoked_at=now_at)
    )
    row = connection.execute(sa.select(api_keys).where(wanted)).first()
    if row is None:
        raise NotFoundError(f"No API key with id '{key_id[:100]}'.", param="key_id")
    return row


def look_up(connection: sa.Connection, sha256: str) -> tuple[bool, Row | None]:
    """Return whether any key was ever made, and the good key with that hash."""
    row = connection.execute(
        sa.select(api_keys).where(api_keys.c.sha256 == sha256, api_keys.c.revoked_at.is_(None))
    ).first()
    if row is not None:
        return True, row
    return connection.scalar(sa.select(api_keys.c.id).limit(1)) is not None, None


def summary(connection: sa.Connection) -> tuple[bool, bool]:
    """Return whether any key was ever made, and whether a good one has no checksum."""
    made = connection.scalar(sa.select(api_keys.c.id).limit(1)) is not None
    old = sa.select(api_keys.c.id).where(
        api_keys.c.revoked_at.is_(None),
        sa.not_(api_keys.c.prefix.startswith(START, autoescape=True)),
    )
    return made, made and connection.scalar(old.limit(1)) is not None


def to_proto(row: Row) -> admin_pb2.ApiKey:
    """Return a key's row as its message."""
    return admin_pb2.ApiKey(
        id=row.id,
        project_id=row.project_id,
        name=row.name,
        prefix=row.prefix,
        last_four=row.last_four,
        created_at=row.created_at,
        revoked_at=row.revoked_at,
        requests_per_minute=row.requests_per_minute,
    )
