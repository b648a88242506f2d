"""Ports for what a test starts, and starts again on the same one."""

import itertools
import os
import random
import re
from typing import Final

from services.cli.shared.ports import is_free
from services.cli.up.plan import Address

# Below what the system gives to outgoing connections and to whoever asks for port 0, and below
# what `nightshift up` draws from. Each process of tests has a slice of its own, and goes round in
# it: a server that is down for a moment finds no other test's on its port.
_LOWEST: Final = 8_600
_SLICE: Final = 800
_SLICES: Final = 8

_worker = re.search(r"\d+$", os.environ.get("PYTEST_XDIST_WORKER", ""))
_first = _LOWEST + _SLICE * (int(_worker.group()) % (_SLICES - 1) if _worker else _SLICES - 1)
_begin = random.Random().randrange(_SLICE)
_round = itertools.cycle(_first + (_begin + each) % _SLICE for each in range(_SLICE))


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on.

    Raises:
        OSError: there is none.
    """
    for port in itertools.islice(_round, _SLICE):
        if is_free(Address("127.0.0.1", port)):
            return port
    raise OSError(f"no free port from {_first} to {_first + _SLICE - 1}")


def free_address() -> str:
    """Return such a port with its host, `127.0.0.1:PORT`."""
    return f"127.0.0.1:{free_port()}"
