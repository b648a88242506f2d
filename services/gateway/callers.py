"""Where a request comes from."""

import ipaddress
from typing import Final
from urllib.parse import unquote

from starlette.types import Scope

_IPV6_NETWORK_BITS: Final = 64
"""What one IPv6 customer has at least: addresses of one such network are one client."""


def caller_address(scope: Scope) -> str:
    """Return the address of an HTTP request's client; empty where it has none."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def peer_address(peer: str) -> str:
    """Return the address of a gRPC call's client, of `ipv4:1.2.3.4:5` or `ipv6:%5B::1%5D:5`."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    return unquote(rest).rpartition(":")[0].strip("[]")


def network_of(address: str) -> str:
    """Return what limits count as one client: an IPv4 address, or an IPv6 network."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return str(ip.ipv4_mapped)
        return str(ipaddress.ip_network((ip, _IPV6_NETWORK_BITS), strict=False))
    return str(ip)
