"""Text with NUL characters, which PostgreSQL has no way to keep and SQLite and JSON have.

They may stand in what users send (a file's name, an id that they look for), and that works the same
on both. On the way in each NUL becomes two characters of Unicode's private range, of which the
first is itself doubled; on the way out the other way round. Texts without either are untouched.
"""

from typing import Any, Final

from psycopg.adapt import AdaptersMap
from psycopg.types.string import StrDumperUnknown, TextLoader

_MARK: Final = "\ue000"
_NUL: Final = _MARK + "\ue001"


def stored(text: str) -> str:
    """Return how a text is kept."""
    if "\x00" in text or _MARK in text:
        return text.replace(_MARK, _MARK + _MARK).replace("\x00", _NUL)
    return text


def told(kept: str) -> str:
    """Return the text that `stored` made `kept` of."""
    if _MARK not in kept:
        return kept
    halves = kept.split(_MARK + _MARK)
    return _MARK.join(half.replace(_NUL, "\x00") for half in halves)


class _Dumper(StrDumperUnknown):
    def dump(self, obj: str) -> Any:
        return super().dump(stored(obj))


class _Loader(TextLoader):
    def load(self, data: Any) -> Any:
        text = super().load(data)
        return told(text) if isinstance(text, str) else text


def register_text(adapters: AdaptersMap) -> None:
    """Keep and tell texts so on connections of these adapters."""
    adapters.register_dumper(str, _Dumper)
    for name in ("text", "varchar"):
        adapters.register_loader(name, _Loader)
