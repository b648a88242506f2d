"""Blobs whose list was made before the rows were read."""

from collections.abc import Iterator
from pathlib import Path

from services.store.blobs.reader import BlobReader


class ListedBlobs:
    """See `BlobReader`. What is written later is not in the list, and so is missed by no row."""

    def __init__(self, blobs: BlobReader, to: Path) -> None:
        """List what is in `blobs` now, in the file `to`: there may be more than memory holds."""
        self._blobs = blobs
        self._list = to
        with to.open("w") as file:
            # A name with an end of line is none of ours, and is told of as that anyway.
            file.writelines(
                f"{size} {name.replace(chr(10), '?')}\n" for name, size in blobs.names()
            )

    def names(self) -> Iterator[tuple[str, int]]:
        """See `BlobReader.names`."""
        with self._list.open() as file:
            for line in file:
                size, _, name = line.rstrip("\n").partition(" ")
                yield name, int(size)

    def size(self, name: str) -> int | None:
        """See `BlobReader.size`."""
        return self._blobs.size(name)

    def read(self, name: str, offset: int, length: int) -> bytes:
        """See `BlobReader.read`."""
        return self._blobs.read(name, offset, length)

    def unfinished(self) -> int:
        """See `BlobReader.unfinished`."""
        return self._blobs.unfinished()
