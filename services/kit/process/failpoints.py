"""Named places to die in. Each step that leaves something durable behind passes two of them.

They are inactive unless `NIGHTSHIFT_FAILPOINTS` arms some, which only tests do. They also set
`NIGHTSHIFT_UNDER_TEST`: without it a process refuses to start, so that no variable set by mistake
kills a service in production.

    NIGHTSHIFT_UNDER_TEST=1
    NIGHTSHIFT_FAILPOINTS="result.record:before=kill;finalize.write:after@2=freeze"

`before` is the last moment at which the step has left nothing behind, `after` the first at which
it has, and nobody knows of it yet. An armed place acts once, at its N-th passing (`@N`, 1 if not
given). With `NIGHTSHIFT_FAILPOINTS_DIR` it leaves a file of its name there before it acts, and a
process started later finds it and passes: what restarts does not die again.
"""

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.kit.process.settings import SettingsError

_ARMED: Final = re.compile(r"(?P<place>[a-z_.]+:(before|after))(@(?P<nth>\d+))?=(?P<action>\w+)")
_ACTIONS: Final = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


@dataclass(slots=True)
class _Armed:
    signal: signal.Signals
    passings_left: int


class Failpoints:
    """The armed places of a process."""

    def __init__(self, armed: str, folder: str) -> None:
        """Arm what `armed` lists.

        Raises:
            SettingsError: `armed` is not a list of `STEP:before|after[@N]=kill|freeze`.
        """
        self._folder = Path(folder) if folder else None
        self._armed: dict[str, _Armed] = {}
        for text in filter(None, armed.split(";")):
            found = _ARMED.fullmatch(text)
            if found is None or found["action"] not in _ACTIONS:
                raise SettingsError(
                    f"NIGHTSHIFT_FAILPOINTS: {text!r} is not STEP:before|after[@N]=kill|freeze"
                )
            self._armed[found["place"]] = _Armed(_ACTIONS[found["action"]], int(found["nth"] or 1))

    def reach(self, place: str) -> None:
        """Pass a place; the process is killed or stopped there if it is armed and its turn."""
        armed = self._armed.get(place)
        if armed is None:
            return
        armed.passings_left -= 1
        if armed.passings_left > 0:
            return
        del self._armed[place]
        if self._folder is not None:
            try:
                (self._folder / place).touch(exist_ok=False)
            except FileExistsError:
                return
        # To this thread: a stop that is the process's may find this thread a few statements on,
        # since any thread may be the one that takes it.
        signal.pthread_kill(threading.get_ident(), armed.signal)


def _of_environment() -> Failpoints:
    armed = os.environ.get("NIGHTSHIFT_FAILPOINTS", "")
    folder = os.environ.get("NIGHTSHIFT_FAILPOINTS_DIR", "")
    try:
        if armed and os.environ.get("NIGHTSHIFT_UNDER_TEST") != "1":
            raise SettingsError(
                "NIGHTSHIFT_FAILPOINTS kills processes and is for tests only; unset it"
            )
        return Failpoints(armed, folder)
    except SettingsError as error:
        # While modules are read, nobody is there yet who could tell it.
        sys.stderr.write(f"nightshift: {error}\n")
        sys.exit(2)


_failpoints: Final = _of_environment()


def before(step: str) -> None:
    """Pass the place before a step: nothing of it is done."""
    _failpoints.reach(f"{step}:before")


def after(step: str) -> None:
    """Pass the place after a step: it is done, and nobody knows yet."""
    _failpoints.reach(f"{step}:after")


@contextlib.contextmanager
def around(step: str) -> Iterator[None]:
    """Pass both places of the step in the block; not the second where it failed."""
    before(step)
    yield
    after(step)
