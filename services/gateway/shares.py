"""Slots that many want at once: nobody holds so many of them that others find none."""

import contextlib
from collections import Counter
from collections.abc import Iterator

from services.gateway.auth import Caller
from services.gateway.callers import network_of
from services.kit.wire.errors import RateLimitedError, UnavailableError


class Shares:
    """A number of slots, of which each holder may have as many as are left free for others.

    One holder alone gets half of them, two get a third each, and so on: whoever comes finds room
    without anything having been set aside (Choudhury and Hahne, "Dynamic queue length thresholds
    for shared-memory packet switches", 1998).
    """

    def __init__(self, most: int) -> None:
        """Have `most` slots, all free."""
        self.most = most
        self._held: Counter[str] = Counter()
        self._taken = 0

    @property
    def taken(self) -> int:
        """How many are held."""
        return self._taken

    def may_take(self, holder: str) -> bool:
        """Whether a holder may have one more."""
        return self._held[holder] < self.most - self._taken

    def take(self, holder: str) -> None:
        """Give a holder a slot; whether it may have one is asked before."""
        self._held[holder] += 1
        self._taken += 1

    def give_back(self, holder: str) -> None:
        """Take a slot back."""
        self._taken -= 1
        self._held[holder] -= 1
        if not self._held[holder]:
            del self._held[holder]

    @contextlib.contextmanager
    def held(self, caller: Caller, what: str, *, retry_seconds: float = 1.0) -> Iterator[None]:
        """Hold a slot meanwhile.

        Args:
            caller: who wants it: its project, or without keys its address.
            what: what the slots are for, such as `uploads`.
            retry_seconds: when to come again.

        Raises:
            RateLimitedError: the caller has its share.
            UnavailableError: all are taken.
        """
        holder = holder_of(caller)
        if not self.may_take(holder):
            mine = self._held[holder]
            if not mine:
                raise UnavailableError(
                    f"Too many {what} run at once; try again.", retry_after_seconds=retry_seconds
                )
            raise RateLimitedError(
                f"You have {mine} {what} running, which is your share of what this server runs at "
                "once. Wait until one has ended.",
                retry_after_seconds=retry_seconds,
            )
        self.take(holder)
        try:
            yield
        finally:
            self.give_back(holder)


def holder_of(caller: Caller) -> str:
    """Return who shares are counted by: the project of a key, without keys the address."""
    if caller.key_id is not None:
        return f"project {caller.project_id}"
    return network_of(caller.client)
