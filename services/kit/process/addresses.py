"""Addresses as settings name them: `host:port`, or several of them. Pure."""

from typing import Final
from urllib.parse import urlsplit

_BUS_SCHEMES: Final = ("nats", "tls", "ws", "wss")


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`; an IPv6 host stands in brackets.

    Raises:
        ValueError: it is no such address.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isascii() or not port.isdigit():
        raise ValueError("expected host:port, such as 127.0.0.1:8000")
    if int(port) > 65_535:
        raise ValueError("a port is at most 65535")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 host stands in brackets, such as [::1]:8000")
    if not _may_be_host(host):
        raise ValueError("the host before the port is neither a name nor an address")
    return host, int(port)


def _may_be_host(host: str) -> bool:
    """Tell whether a name can be looked up at all: else whoever calls it would only seem away."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return bool(host) and host.isprintable() and " " not in host


def parse_addresses(text: str) -> list[tuple[str, int]]:
    """Return hosts and ports of `host:port,host:port,…`, in the order given.

    Raises:
        ValueError: it is no such list, or names none.
    """
    entries = [split_address(each.strip()) for each in text.split(",") if each.strip()]
    if not entries:
        raise ValueError("expected host:port, or several of them separated by commas")
    return entries


def parse_bus_urls(text: str) -> list[str]:
    """Return the servers of `nats://host:port,nats://host:port,…`, in the order given.

    A server may be `host` or `host:port` alone.

    Raises:
        ValueError: it is no such list, or names none; without its text, which may hold a password.
    """
    wrong = "expected nats://host:port, or several of them separated by commas"
    servers = [each.strip() for each in text.split(",") if each.strip()]
    for server in servers:
        parts = urlsplit(server if "://" in server else f"nats://{server}")
        try:
            is_server = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:
            raise ValueError(wrong) from None
        if not is_server or parts.scheme not in _BUS_SCHEMES:
            raise ValueError(wrong)
    if not servers:
        raise ValueError(wrong)
    return servers
