"""What an engine started, line by line, in a file of its own: whoever tries faults can count.

One line of text for each line that got a seat, five words parted by blanks:

    <Unix seconds> <batch id> <ordinal of the line> <attempt> <times the engine was asked again>

The last is 0 where an attempt starts a line for the first time; more are answers such as 429 that
the executor tried again, which repeat no work that was done.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from services.executor.engines.base import EngineRequest


class StartedFile:
    """One file of one executor process, appended to without a buffer.

    What was noted outlives the process (not the machine: nothing is synced).
    """

    def __init__(self, folder: Path, name: str) -> None:
        """Open `FOLDER/NAME.started`; both are made where they are missing."""
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(folder / f"{name}.started", flags, 0o600)

    def note(self, requests: Sequence[EngineRequest]) -> None:
        """Append them in one write."""
        if requests:
            now = time.time()
            os.write(self._file, "".join(_text(now, one) for one in requests).encode())


def _text(now: float, request: EngineRequest) -> str:
    # The id ends with the line's ordinal and its retries, 8 and 4 hex digits.
    line, retries = int(request.request_id[-12:-4], 16), int(request.request_id[-4:], 16)
    return f"{now:.3f} {request.batch_id or '-'} {line} {request.attempt} {retries}\n"
