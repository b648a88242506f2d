"""How long `nightshift up` waits for a child that is to end."""

import pytest

from services.cli.up.fleet import stop_seconds_of

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("service", "environment", "seconds"),
    [
        ("store", {}, 15),
        ("executor", {}, 40),
        ("executor", {"NIGHTSHIFT_EXECUTOR_DRAIN_SECONDS": "90"}, 105),
        ("executor", {"NIGHTSHIFT_EXECUTOR_DRAIN_SECONDS": "soon"}, 40),
        ("gateway", {}, 15),
        ("gateway", {"NIGHTSHIFT_GATEWAY_DRAIN_DELAY_SECONDS": "30"}, 45),
    ],
)
def test_what_a_service_gives_to_others_it_gets_too(
    service: str, environment: dict[str, str], seconds: float
) -> None:
    assert stop_seconds_of(service, environment) == seconds
