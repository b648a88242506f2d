"""Indexes of a file's parts, made before anyone knows in which order they follow each other.

A part is cut anywhere, so that its first line may have begun, and its last may end, in another
part. Its index tells of the lines between and how long these two *pieces* are; their bytes lie in
the part's blob. Joining the parts' indexes in the order of the file reads one line for each part,
and gives the index that `LineIndexer` gives for the whole file.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import orjson

from services.store.domain.index.body_shape import HEAD_BYTES
from services.store.domain.index.line_index import (
    ANOTHER,
    IndexFormatError,
    LineIndex,
    LineIndexer,
    Records,
)
from services.store.domain.index.names import Names

_MAGIC: Final = b"NSPART\x01\x00"
_HEAD_LENGTH_BYTES: Final = 8
_Ids = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class PartIndex:
    """What is known of a part alone; sizes in bytes.

    `size`: the whole part. `ends_line`: it holds an LF; without one it is a single piece, all
    `first`. `first`: the piece before the first LF. `last`: the piece behind the last one.
    `between`: the lines between the pieces, offsets from the part's start. `skipped`: those of them
    that are no requests. `head`: the part's start, as far as a file's shape needs it. `lone_cr`: as
    in `shape.look_at`. `complete`: its names are all there; otherwise it cannot be joined.
    """

    size: int
    ends_line: bool
    first: int
    last: int
    between: LineIndex
    skipped: int
    head: bytes
    lone_cr: bool
    complete: bool

    def to_bytes(self) -> bytes:
        """A versioned head, then the index of the lines between. Read back by `from_bytes`."""
        head = orjson.dumps(
            {
                "size": self.size,
                "ends_line": self.ends_line,
                "first": self.first,
                "last": self.last,
                "skipped": self.skipped,
                "head": self.head.decode("latin-1"),
                "lone_cr": self.lone_cr,
                "complete": self.complete,
            }
        )
        head += b" " * (-len(head) % 8)
        length = len(head).to_bytes(_HEAD_LENGTH_BYTES, "little")
        return b"".join((_MAGIC, length, head, *self.between.pieces()))

    @classmethod
    def from_bytes(cls, data: bytes) -> "PartIndex":
        """Views into `data`, the head apart. Raises IndexFormatError."""
        start = len(_MAGIC) + _HEAD_LENGTH_BYTES
        if data[: len(_MAGIC)] != _MAGIC or len(data) < start:
            raise IndexFormatError("not a part's index of this version")
        head_end = start + int.from_bytes(data[len(_MAGIC) : start], "little")
        try:
            head = orjson.loads(data[start:head_end])
            return cls(
                size=head["size"],
                ends_line=head["ends_line"],
                first=head["first"],
                last=head["last"],
                between=LineIndex.from_bytes(data[head_end:]),
                skipped=head["skipped"],
                head=head["head"].encode("latin-1"),
                lone_cr=head["lone_cr"],
                complete=head["complete"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IndexFormatError(f"a damaged part's index: {error}") from error


class PartIndexer(LineIndexer):
    """Takes a part in feeds cut anywhere and makes its index; nothing of its first piece is kept.

    Memory and arguments as those of `LineIndexer`; `key` must be the same for all parts of a file.
    """

    def __init__(self, *, max_lines: int, max_line_bytes: int, key: bytes) -> None:
        super().__init__(max_lines=max_lines, max_line_bytes=max_line_bytes, key=key)
        # Before each line between there is one at least: the one that the first piece is of.
        self._first = False
        self._start = b""
        self._size = 0
        self._first_piece = 0
        self._ends_line = False

    def feed(self, data: bytes) -> None:
        """Takes the part's next bytes, any number of them. ValueError after `finish_part`."""
        if self._index is not None:
            raise ValueError("the index is finished")
        if len(self._start) < HEAD_BYTES:
            self._start += data[: HEAD_BYTES - len(self._start)]
        self._size += len(data)
        if not self._ends_line:
            end = data.find(b"\n")
            self._first_piece += len(data) if end < 0 else end
            if end < 0:
                return
            self._ends_line = True
            self._position = self._first_piece + 1
            data = data[end + 1 :]
        super().feed(data)

    def finish_part(self) -> PartIndex:
        """The index of what was fed; nothing can be fed afterwards."""
        last = self._dropped or len(self._open)
        # What is open ends in another part.
        self._dropped = 0
        self._open.clear()
        return PartIndex(
            size=self._size,
            ends_line=self._ends_line,
            first=self._first_piece,
            last=last,
            between=self.finish(),
            skipped=self._skipped,
            head=self._start,
            lone_cr=self._lone_cr,
            complete=not (self._urls.full or self._models.full),
        )


class PartJoiner(LineIndexer):
    """Takes the indexes of a file's parts, in the file's order, and makes its index.

    For each part: `wanted`, then `add` with the bytes that it names; at the end the same with
    `wanted_at_end` and `finish_file`. Arguments as those of the parts' indexers. Memory: that of
    `LineIndexer`.
    """

    def __init__(self, *, max_lines: int, max_line_bytes: int, key: bytes) -> None:
        super().__init__(max_lines=max_lines, max_line_bytes=max_line_bytes, key=key)
        self._size = 0

    def wanted(self, part: PartIndex) -> tuple[int, int]:
        """(offset, length) in the file of what `add` needs: the line that the part ends.

        Of a line that is too long only its start; of a part that ends no line, nothing.
        """
        if not part.ends_line:
            return self._position, 0
        return self._position, min(self._open_size + part.first, self._max_open)

    def wanted_at_end(self) -> tuple[int, int]:
        """(offset, length) in the file of its last line, where that has no LF."""
        return self._position, min(self._open_size, self._max_open)

    @property
    def _open_size(self) -> int:
        """Bytes of the line that has begun and not ended."""
        return self._size - self._position

    def add(self, part: PartIndex, line: bytes) -> None:
        """Takes the next part; `line` is what `wanted` said.

        Raises ValueError when the part is not complete: the file is to be indexed from its bytes.
        """
        if not part.complete:
            raise ValueError("a part with more names than its index holds cannot be joined")
        if len(self._head) < HEAD_BYTES:
            self._head += part.head[: HEAD_BYTES - len(self._head)]
        if part.ends_line:
            self._take_wanted(self._open_size + part.first, line)
            self._take_between(part)
            self._position = self._size + part.size - part.last
        self._lone_cr |= part.lone_cr
        self._size += part.size

    def finish_file(self, line: bytes) -> LineIndex:
        """The index of the file; `line` is what `wanted_at_end` said."""
        if self._open_size:
            self._take_wanted(self._open_size, line)
        return self.finish()

    def _take_wanted(self, size: int, line: bytes) -> None:
        if size > self._max_open:
            self._note_lone_cr(line)
            self._take_too_long(size)
        else:
            self._take(line)

    def _take_between(self, part: PartIndex) -> None:
        """The lines between a part's pieces, as many as the file's index has room for."""
        index = part.between
        kept = index.records[: max(0, self._max_records - self._requests)]
        if len(kept):
            self._take_breaks(index.breaks[index.breaks["ordinal"] < len(kept)])
            moved = kept.copy()
            offsets = index.offsets()[: len(kept)] + np.uint64(self._size)
            moved["offset_low"] = offsets & np.uint64(0xFFFF_FFFF)
            moved["offset_high"] = offsets >> np.uint64(32)
            moved["url"] = _renamed(kept["url"], index.urls, self._urls)
            moved["model"] = _renamed(kept["model"], index.models, self._models)
            self._packed += moved.tobytes()
        self._requests += index.lines
        self._skipped += part.skipped
        self._any_object |= index.any_object

    def _take_breaks(self, breaks: Records) -> None:
        """The breaks of records that are about to be taken, the first of them included."""
        if self._skipped != self._skipped_before and not (
            len(breaks) and breaks["ordinal"][0] == 0
        ):
            self._note_break(self._requests, self._skipped)
        for ordinal, skipped in breaks.tolist():
            self._note_break(self._requests + ordinal, self._skipped + skipped)


def _renamed(ids: _Ids, names: tuple[str, ...], known: Names) -> _Ids:
    """A part's ids as the file's, those of names that are new to it in the part's order."""
    table = np.full(ANOTHER + 1, ANOTHER, np.uint16)
    used = ids[ids != ANOTHER]
    for number in range(int(used.max()) + 1 if used.size else 0):
        table[number] = known.id_of(names[number])
    return table[ids]
