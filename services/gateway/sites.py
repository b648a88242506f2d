"""Which web pages may use this server while no API key is needed: its own only.

A browser sends requests on behalf of any page that its user has open. A page of elsewhere may also
have its own name lead to this server (DNS rebinding), so that the name of the server counts too.
"""

import ipaddress
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request

from services.kit.wire.errors import PermissionError_, UnsupportedMediaError

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_MAKE_A_KEY: Final = "(HINT: `nightshift keys create` makes one.)"
_MOST_SHOWN: Final = 200


class Sites:
    """The names under which this server is reached."""

    def __init__(self, hosts: Iterable[str] = ()) -> None:
        """Take `hosts` beside `localhost` and every IP address."""
        self._hosts = {"localhost", *(host.lower() for host in hosts)}

    def check(self, request: Request) -> None:
        """Refuse what a web page of elsewhere may have had a browser send.

        Raises:
            PermissionError_: the request names another host, or comes from a page of elsewhere.
            UnsupportedMediaError: it comes from a page and has a body that is not declared as JSON.
        """
        headers = request.headers
        for host in headers.getlist("host"):
            self._check_host(host)
        origin = headers.get("origin")
        is_own = origin is None or _is_own(origin, headers.get("host", ""))
        if not is_own or headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            raise PermissionError_(
                "A web page of another site may not use this server while no API key is "
                f"configured. {_MAKE_A_KEY}",
                code="origin_not_allowed",
            )
        if origin is not None:
            _check_body(headers)

    def _check_host(self, host: str) -> None:
        name = _name_of(host)
        if name not in self._hosts and not _is_address(name):
            raise PermissionError_(
                f"This server does not take requests for the host {name[:_MOST_SHOWN]!r} while no "
                "API key is configured. Use its IP address, or have the operator list the name in "
                f"NIGHTSHIFT_GATEWAY_ALLOWED_HOSTS, or make a key. {_MAKE_A_KEY}",
                code="host_not_allowed",
            )


def _check_body(headers: Headers) -> None:
    """Refuse a body of a type that pages may send anywhere without being asked first."""
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/json", "multipart/form-data"):
        raise UnsupportedMediaError(
            "A web page sends JSON as Content-Type application/json, and files as "
            f"multipart/form-data, not {kind[:_MOST_SHOWN]!r}."
        )


def _name_of(host: str) -> str:
    """Return the name or address in a header `Host`, without its port."""
    name, _, port = host.strip().lower().rpartition(":")
    return name if name and port.isascii() and port.isdigit() else host.strip().lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _is_own(origin: str, host: str) -> bool:
    """Tell whether a page of `origin` came from the host and port that it now asks."""
    try:
        page = urlsplit(origin)
        default = _DEFAULT_PORTS[page.scheme]
        asked = urlsplit(f"//{host}")
        return bool(page.hostname) and (page.hostname, page.port or default) == (
            asked.hostname,
            asked.port or default,
        )
    except (KeyError, ValueError):
        return False
