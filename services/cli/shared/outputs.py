"""Files that a command writes: there under their names only once they are whole."""

import contextlib
from pathlib import Path


class Output:
    """One file that is named on the command line.

    It is written beside its place and moved there. What is no file (a pipe, `/dev/null`) is written
    to as it is: moved to, it would be replaced by a file. A link goes on pointing where it does.
    """

    def __init__(self, path: Path) -> None:
        """Name it; nothing is made yet."""
        self.path = path
        self._real = path.resolve()
        self.is_file = self._real.is_file() or not self._real.exists()
        self.place = self._real
        """What is to be opened and written."""
        if self.is_file:
            self.place = self._real.with_name(f".{self._real.name}.partial")

    def keep(self) -> None:
        """Give it its name: it is whole. Raises OSError."""
        if self.is_file:
            self.place.replace(self._real)

    def discard(self) -> None:
        """Leave nothing of it, unless it was kept."""
        if self.is_file:
            with contextlib.suppress(OSError):
                self.place.unlink()
