"""First in, first out: strictly by (`seq`, line)."""

from collections.abc import Iterable, Sequence

from services.scheduler.domain.window import WindowBatch


class Fifo:
    """A later batch gets only what earlier ones leave."""

    def order(self, batches: Sequence[WindowBatch], now_ms: int) -> Iterable[WindowBatch]:
        """Return them by order of creation, whatever the time."""
        del now_ms
        return sorted(batches, key=lambda batch: batch.seq)
