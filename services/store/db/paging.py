"""Pages of lists."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

from google.protobuf.message import Message

from protos.nightshift.v1 import common_pb2
from services.kit.wire.client_numbers import check_range

MOST_BYTES: Final = 3 * 1024 * 1024
"""Bytes of one answer; a gRPC message may have a third more, and a larger one fails as a whole."""
_FRAMING_BYTES: Final = 8

Item = TypeVar("Item", bound=Message)


@dataclass(frozen=True, slots=True)
class Page:
    """What follows `after`, at most `limit` items."""

    after: str
    limit: int


def page_of(request: common_pb2.PageRequest, *, default: int, most: int) -> Page:
    """Return the page asked for; a limit of 0 means `default`.

    Raises:
        InvalidRequestError: the limit is out of 1 to `most`.
    """
    limit = request.limit or default
    check_range("limit", limit, 1, most)
    return Page(request.after, limit)


def fitting(items: Iterable[Item]) -> tuple[list[Item], bool]:
    """Return the first of a page's items, as many as fit into one answer, and whether all do.

    What is left is asked for as any next page is. The first always fits: nothing is so large alone.
    """
    chosen: list[Item] = []
    size = 0
    for item in items:
        size += item.ByteSize() + _FRAMING_BYTES
        if chosen and size > MOST_BYTES:
            return chosen, False
        chosen.append(item)
    return chosen, True
