"""Identifiers: what they look like and how they are made."""

import hashlib
import re
from typing import Final, NewType, Protocol

import uuid_utils

ProjectId = NewType("ProjectId", str)
FileId = NewType("FileId", str)
BatchId = NewType("BatchId", str)
ChunkId = NewType("ChunkId", str)
PoolId = NewType("PoolId", str)

DEFAULT_PROJECT: Final = ProjectId("default")
"""Owner of everything while no API key is configured."""

_PUBLIC_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")


class IdGenerator(Protocol):
    """Source of unique hex strings; an argument everywhere, so that tests can choose them."""

    def __call__(self) -> str:
        """Return 32 lowercase hex digits that were never returned before."""
        ...


def uuid7_hex() -> str:
    """Return a UUIDv7 (RFC 9562) as 32 hex digits, so that ids sort by time of creation."""
    return uuid_utils.uuid7().hex


def is_public_id(text: str) -> bool:
    """Tell whether `text` can be an id at all; others are answered as unknown without a look-up."""
    return _PUBLIC_ID.fullmatch(text) is not None


def pool_id_of(name: str) -> PoolId:
    """Return the pool id of a pool's name: a subject token for the bus, unique by 8 hex digits."""
    readable = re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-")[:32] or "pool"
    return PoolId(f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}")
