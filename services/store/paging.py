"""Pages of lists."""

from dataclasses import dataclass

from protos.nightshift.v1 import common_pb2
from services.kit.errors import InvalidRequestError


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
    if 1 <= limit <= most:
        return Page(request.after, limit)
    below = limit < 1
    raise InvalidRequestError(
        f"Invalid 'limit': integer {'below minimum' if below else 'above maximum'} value. "
        f"Expected a value {'>= 1' if below else f'<= {most}'}, but got {limit} instead.",
        code="integer_below_min_value" if below else "integer_above_max_value",
        param="limit",
    )
