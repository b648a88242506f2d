"""Whatever headers say, a request is judged: only own names and own pages are let in."""

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from services.gateway.sites import Sites
from services.kit.wire.errors import PermissionError_, UnsupportedMediaError

pytestmark = pytest.mark.unit

OWN = ["localhost", "gateway", "127.0.0.1", "[::1]", "::1"]
REST = [
    "http",
    "https",
    "://",
    ":",
    "/",
    "[",
    "]",
    "@",
    ".",
    "80",
    "443",
    "99999",
    "null",
    "%",
    " ",
]
PARTS = st.sampled_from([*OWN, *REST, "evil.example"])
VALUES = st.one_of(st.lists(PARTS, max_size=7).map("".join), st.text(max_size=20))


def request(**headers: str) -> Request:
    """Return a request with these headers."""
    raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "headers": raw})


@given(VALUES, VALUES)
def test_any_headers_are_judged(host: str, origin: str) -> None:
    with contextlib.suppress(PermissionError_, UnsupportedMediaError):
        Sites(["gateway"]).check(request(host=host, origin=origin))
        assert re.sub(r":\d+$", "", host.strip()) in OWN
        assert "evil.example" not in origin
