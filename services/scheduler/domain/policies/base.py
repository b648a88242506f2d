"""What every policy is: an order of the batches of one pool."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from services.scheduler.domain.window import WindowBatch


class Policy(Protocol):
    """Decides which batches of a pool get its capacity first."""

    def order(self, batches: Sequence[WindowBatch], now_ms: int) -> Iterable[WindowBatch]:
        """Return `batches` in the order in which they are to be cut.

        Args:
            batches: open ones of one pool, ascending by `seq`.
            now_ms: the store's clock, in milliseconds since the epoch.
        """
        ...
