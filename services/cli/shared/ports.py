"""Ports for services that only this machine talks to."""

import random
import socket
from pathlib import Path
from typing import Final

from services.cli.up.plan import Address

# Below the range from which the system gives ports to outgoing connections: a port that a
# restarting service left for a moment is then taken by no client, not even by one that connects
# to itself while it waits for that service.
_LOWEST: Final = 15_000
_DEFAULT_EPHEMERAL_START: Final = 32_768


def is_free(address: Address) -> bool:
    """Tell whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do, so that connections that linger after a restart are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
            probe.listen(1)
        except OSError:
            return False
    return True


def is_open(address: Address) -> bool:
    """Tell whether a server of this machine listens there now."""
    try:
        socket.create_connection((address.host, address.port), timeout=1).close()
    except OSError:
        return False
    return True


class FreePorts:
    """Gives out free ports, none of them twice."""

    def __init__(self, choose: random.Random) -> None:
        """Draw from `choose`, so that two starts at once seldom want the same port."""
        self._choose = choose
        self._given: set[int] = set()
        self._above = _ephemeral_start()

    def take(self, host: str = "127.0.0.1") -> Address:
        """Return an address on `host` that nothing listens on.

        Raises:
            OSError: none was found in 1,000 draws.
        """
        for _ in range(1000):
            port = self._choose.randrange(_LOWEST, self._above)
            if port not in self._given and is_free(Address(host, port)):
                self._given.add(port)
                return Address(host, port)
        raise OSError(f"no free port on {host} between {_LOWEST} and {self._above}")


def _ephemeral_start() -> int:
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
        start = int(text.split()[0])
    except (OSError, ValueError, IndexError):
        start = _DEFAULT_EPHEMERAL_START
    return start if start > _LOWEST + 2_000 else 65_536
