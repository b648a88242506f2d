"""What tests of faults ask of a whole running system, whatever it is made of."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol


class System(Protocol):
    """Real processes that can be hit from outside, by name: `store-0`, `executor-1`, `nats-2`.

    Every call that hits returns when what it did is undone: what was killed runs again, what was
    frozen goes on. Hits may overlap; one that finds its target gone waits for it to come back.
    """

    @property
    def processes(self) -> Mapping[str, Sequence[str]]:
        """Names of all processes, by kind."""
        ...

    @property
    def reaches(self) -> Mapping[str, Sequence[str]]:
        """Kinds that a kind of process talks to and can be parted from; empty without proxies."""
        ...

    @property
    def lasting(self) -> frozenset[str]:
        """Kinds that keep what they know when they are killed."""
        ...

    @property
    def base_urls(self) -> Sequence[str]:
        """What an OpenAI client takes, one for each gateway."""
        ...

    @property
    def started_dir(self) -> Path:
        """Where executors note what their engines start; see `tests.kit.started_lines`."""
        ...

    def pid(self, name: str) -> int:
        """Return a process's id; of the one that was, while it is away."""
        ...

    async def open(self) -> None:
        """Start everything; returns when batches can be taken."""
        ...

    async def close(self) -> None:
        """Stop everything in order. AssertionError where something of it is left."""
        ...

    async def kill(self, names: Sequence[str], seconds: float) -> None:
        """SIGKILL these at once; they come back after `seconds`, or as soon as they can."""
        ...

    async def freeze(self, names: Sequence[str], seconds: float) -> None:
        """SIGSTOP these for `seconds`."""
        ...

    async def restart(self, names: Sequence[str]) -> None:
        """SIGTERM these at once; they come back as soon as they have ended."""
        ...

    async def part(self, name: str, kinds: Sequence[str], seconds: float) -> None:
        """Let nothing pass between a process and all of some kinds for `seconds`."""
        ...

    async def wipe(self, name: str, seconds: float) -> None:
        """Kill it, remove all that it keeps, and have it come back after `seconds`."""
        ...

    async def check(self) -> None:
        """Have `nightshift doctor --check` look at all that is stored. AssertionError with it."""
        ...

    def log_end(self, size: int = 6_000) -> str:
        """Return the last characters of what its processes logged."""
        ...
