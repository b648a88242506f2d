"""Numbers that clients choose, within bounds; refused in the words of OpenAI's API."""

from services.kit.wire.errors import InvalidRequestError


def check_range(name: str, value: int, minimum: int, maximum: int) -> None:
    """Refuse a number below `minimum` or above `maximum`.

    Raises:
        InvalidRequestError: it is; `name` is the parameter to blame.
    """
    if minimum <= value <= maximum:
        return
    below = value < minimum
    raise InvalidRequestError(
        f"Invalid '{name}': integer {'below minimum' if below else 'above maximum'} value. "
        f"Expected a value {f'>= {minimum}' if below else f'<= {maximum}'}, but got {value} "
        "instead.",
        code="integer_below_min_value" if below else "integer_above_max_value",
        param=name,
    )
