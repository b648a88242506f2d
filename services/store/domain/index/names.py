"""Distinct names of a file's lines and the ids that stand for them in its index."""

from typing import Final

ANOTHER: Final = 65_535
"""Id of a url or model that the head does not name: absent, too long, or one too many."""
MAX_NAME_CHARS: Final = 512
MAX_NAMES_BYTES: Final = 1024 * 1024
"""Bound on the head's urls, and on its models: names beyond it are `ANOTHER`."""


class Names:
    """Names numbered in the order of their first appearance, bounded in number and in bytes.

    `full`: a name that is not too long was refused, so that others may be missing too.
    """

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.full = False
        self._bytes = 0

    def id_of(self, name: str) -> int:
        """The name's id, a new one if it was not seen before; `ANOTHER` past the bounds."""
        known = self.ids.get(name)
        if known is not None:
            return known
        if len(name) > MAX_NAME_CHARS:
            return ANOTHER
        size = len(name.encode())
        if len(self.ids) >= ANOTHER or self._bytes + size > MAX_NAMES_BYTES:
            self.full = True
            return ANOTHER
        self._bytes += size
        self.ids[name] = number = len(self.ids)
        return number
