"""What each API key has this gateway do, so that an operator sees which one to revoke."""

from typing import Final

import prometheus_client

_REQUESTS = prometheus_client.Counter(
    "nightshift_key_requests_total", "Requests with a good API key, by the key's id.", ["key"]
)
_RUNNING = prometheus_client.Gauge(
    "nightshift_key_requests_running", "Requests in progress, by the API key's id.", ["key"]
)

MAX_KEYS: Final = 1_000
"""Keys that are counted by id, the first ones that call; the others are one, `other`."""

_known: Final[set[str]] = set()


def began(key_id: str) -> None:
    """Count a request of a good key."""
    label = _label(key_id)
    _REQUESTS.labels(label).inc()
    _RUNNING.labels(label).inc()


def ended(key_id: str) -> None:
    """Note the end of a request that began."""
    _RUNNING.labels(_label(key_id)).dec()


def _label(key_id: str) -> str:
    if key_id not in _known:
        if len(_known) >= MAX_KEYS:
            return "other"
        _known.add(key_id)
    return key_id
