"""When the leases of attempts lapse: never before their holders could have been heard."""

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from services.store.db.clock import FAR_MS, GIVEN_UP


@dataclass(frozen=True, slots=True)
class Leases:
    """How leases are judged now; see `database_time`.

    Attributes:
        lease_ms: how long an attempt lives without a beat.
        heard_since_ms: from when on beats could be heard without a gap.
    """

    lease_ms: int
    heard_since_ms: int

    def end_ms(self, until_ms: int) -> int:
        """Return when a lease lapses that runs until `until_ms`."""
        if until_ms == GIVEN_UP:
            return GIVEN_UP
        return max(until_ms, self.heard_since_ms + self.lease_ms)

    def last_sign_ms(self, until_ms: int) -> int:
        """Return when the holder of a lease was last heard, or could not have been."""
        return self.end_ms(until_ms) - self.lease_ms

    def lapsed(self, until_ms: sa.ColumnElement[Any], now_ms: int) -> sa.ColumnElement[bool]:
        """Return the condition that a lease in this column has lapsed."""
        if now_ms < self.heard_since_ms + self.lease_ms:
            return until_ms == GIVEN_UP
        return sa.or_(until_ms <= now_ms, until_ms > now_ms + self.lease_ms + FAR_MS)
