"""Webhooks as values: which events there are, how they look, when to try again, whom not to ask."""

import base64
import hashlib
import ipaddress
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from services.kit.wire.errors import InvalidRequestError
from services.store.domain.state import BatchStatus

EVENT_TYPES: Final[Mapping[BatchStatus, str]] = MappingProxyType(
    {
        BatchStatus.COMPLETED: "batch.completed",
        BatchStatus.FAILED: "batch.failed",
        BatchStatus.EXPIRED: "batch.expired",
        BatchStatus.CANCELLED: "batch.cancelled",
    }
)
"""What is told of each end."""

GIVE_UP_MS: Final = 72 * 3_600_000
"""How long after its event a delivery is tried."""
FIRST_WAIT_MS: Final = 5_000
LONGEST_WAIT_MS: Final = 6 * 3_600_000

MAX_NAME: Final = 256
MAX_URL: Final = 2_048

_SECRET_PREFIX: Final = "whsec_"  # noqa: S105 - what all secrets begin with, not one
_HINT_CHARACTERS: Final = 4

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def event_id(batch_id: str) -> str:
    """Return the id of the event that a batch's end is; it ends once, so that there is one."""
    return f"evt_{batch_id.removeprefix('batch_')}"


def delivery_id(endpoint_id: str, event: str) -> str:
    """Return the id of an event's delivery to an endpoint, which each attempt carries."""
    digest = hashlib.blake2b(f"{endpoint_id} {event}".encode(), digest_size=16)
    return f"wh_{digest.hexdigest()}"


def payload(event: str, event_type: str, batch_id: str, ended_at: int) -> str:
    """Return an event's body, byte for byte what is signed and sent; `ended_at` in Unix seconds."""
    return json.dumps(
        {
            "id": event,
            "object": "event",
            "created_at": ended_at,
            "type": event_type,
            "data": {"id": batch_id},
        },
        separators=(",", ":"),
    )


def wait_ms(attempts: int, chance: float) -> int:
    """Return how long to wait after the failed attempt number `attempts` (from 1).

    Doubles from 5 s to 6 h; of that the second half is left to `chance` (0 to 1), so that what
    failed together does not come back together.
    """
    # 2**13 is beyond the cap already; more would only make large numbers.
    whole = min(LONGEST_WAIT_MS, FIRST_WAIT_MS << min(attempts - 1, 13))
    return int(whole * (0.5 + 0.5 * chance))


def next_try_ms(now_ms: int, since_ms: int, attempts: int, chance: float) -> int | None:
    """Return when to try again after a failed attempt; None when it is to be given up.

    Args:
        now_ms: when the attempt ended.
        since_ms: when the event happened, or was last asked to be sent again.
        attempts: how many attempts there were since.
        chance: 0 to 1.
    """
    if now_ms >= since_ms + GIVE_UP_MS:
        return None
    # The last attempt comes when the time is over, not hours before.
    return min(now_ms + wait_ms(attempts, chance), since_ms + GIVE_UP_MS)


def new_secret(randomness: bytes) -> str:
    """Return a signing secret made of 24 to 64 random bytes."""
    return _SECRET_PREFIX + base64.b64encode(randomness).decode()


def hint(secret: str) -> str:
    """Return what of a secret may be shown: enough to tell two apart."""
    return f"{_SECRET_PREFIX}…{secret.rstrip('=')[-_HINT_CHARACTERS:]}"


def is_public(address: Address) -> bool:
    """Tell whether an address is one of the public internet's.

    No private, loopback, link-local, shared, multicast, reserved or documentation address is, nor
    one of a cloud's metadata services, nor an IPv6 address behind which such an IPv4 one stands.
    """
    if isinstance(address, ipaddress.IPv6Address):
        inner = _embedded(address)
        if inner is not None:
            return is_public(inner)
        if address not in _GLOBAL_UNICAST:
            return False
    return (
        address.is_global
        and not address.is_multicast
        and not any(address in network for network in _REFUSED)
    )


_GLOBAL_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
# What the standard library, by its version, takes for global all the same.
_REFUSED: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            # Azure's metadata: public by its number, answered by the host of each virtual machine.
            "168.63.129.16/32",
            # Reserved for protocols; Oracle's metadata is there.
            "192.0.0.0/24",
            # Relays of 6to4, which is no longer in use.
            "192.88.99.0/24",
            # Reserved for protocols, Teredo among them, and for documentation.
            "2001::/23",
            "3fff::/20",
        ),
    )
)


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that an IPv6 one leads to."""
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour


def check_name(name: str) -> None:
    """Refuse an endpoint's name that does not fit.

    Raises:
        InvalidRequestError: it is empty or too long, or holds a control character.
    """
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise InvalidRequestError(
            f"Invalid 'name': expected 1 to {MAX_NAME} printable characters.",
            code="invalid_value",
            param="name",
        )


def check_event_types(wanted: Sequence[str], param: str = "event_types") -> list[str]:
    """Return the types of events asked for, each once, in our order.

    Raises:
        InvalidRequestError: none, or one that does not exist.
    """
    known = list(EVENT_TYPES.values())
    supported = f"Supported values are: {', '.join(map(repr, known))}."
    if not wanted:
        raise InvalidRequestError(
            f"Invalid '{param}': expected at least one. {supported}",
            code="invalid_value",
            param=param,
        )
    for name in wanted:
        if name not in known:
            raise InvalidRequestError(
                f"Invalid value: '{name[:100]}'. {supported}", code="invalid_value", param=param
            )
    return [name for name in known if name in wanted]


def check_url(url: str, *, allow_private: bool) -> None:
    """Refuse an address that events cannot be sent to; names are judged again when they are sent.

    Raises:
        InvalidRequestError: it is no such URL; the message says what to change.
    """
    fault = _fault_of_url(url, allow_private)
    if fault is not None:
        raise InvalidRequestError(f"Invalid 'url': {fault}.", code="invalid_url", param="url")


def _fault_of_url(url: str, allow_private: bool) -> str | None:
    schemes = ("https", "http") if allow_private else ("https",)
    if len(url) > MAX_URL:
        return f"expected at most {MAX_URL} characters"
    if not url.isascii() or not url.isprintable() or " " in url:
        return "expected printable ASCII; write other letters of the host as punycode"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "it cannot be read; expected one such as https://example.com/webhooks"
    if parts.scheme not in schemes or not host:
        return f"expected {' or '.join(schemes)} and a host, such as https://example.com/webhooks"
    if port == 0:
        return "port 0 cannot be connected to"
    if "@" in parts.netloc:
        return "it must hold no user name or password; a receiver knows us by the signature"
    if parts.fragment:
        return "a part after '#' is never sent; leave it out"
    if not allow_private and _is_plainly_private(host):
        return "its host is not on the public internet"
    return None


def _is_plainly_private(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return not is_public(ipaddress.ip_address(host))
    except ValueError:
        return False
