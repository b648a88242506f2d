"""Whose address a call comes from, and what counts as one client."""

import pytest

from services.gateway.callers import caller_address, network_of, peer_address

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:192.0.2.1:50000", "192.0.2.1"),
        ("ipv6:%5B2001:db8::7%5D:50000", "2001:db8::7"),
        ("ipv6:[::1]:50000", "::1"),
        ("unix:/run/a.sock", ""),
        ("", ""),
    ],
)
def test_a_grpc_peer_is_its_address(peer: str, address: str) -> None:
    assert peer_address(peer) == address


def test_an_http_client_is_its_address() -> None:
    assert caller_address({"client": ("192.0.2.1", 5)}) == "192.0.2.1"
    assert caller_address({"client": None}) == caller_address({}) == ""


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("", ""),
    ],
)
def test_a_customers_ipv6_network_is_one_client(address: str, network: str) -> None:
    assert network_of(address) == network
