"""What compose and Nomad set is what the services read, and their settings take the values."""

import os

import pytest

from tests.deploy import files
from tests.deploy.environments import Container, containers

pytestmark = pytest.mark.deploy

OURS = "NIGHTSHIFT_"
each = pytest.mark.parametrize("container", containers(), ids=str)


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(OURS)]:
        monkeypatch.delenv(name)


def test_every_service_is_started_by_both() -> None:
    for where in ("compose", "nomad"):
        started = {one.service for one in containers() if one.where == where}
        assert started == set(files.OURS), where


@each
def test_the_service_knows_every_variable_that_it_is_given(container: Container) -> None:
    given = {name for name in container.environment if name.startswith(OURS)}
    assert given
    assert given <= files.variables_of(container.service)


@each
def test_its_settings_take_the_values(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in container.environment.items():
        if name.startswith(OURS):
            monkeypatch.setenv(name, value)
    settings = files.settings_of(container.service).load()
    # Set by hand in every container: left to its default, no other container could reach it.
    assert str(getattr(settings, "listen")).startswith("0.0.0.0:")  # noqa: B009 - a field of all
    assert str(getattr(settings, "secret_file")).endswith("/nightshift")  # noqa: B009


@each
def test_it_is_told_where_everything_is(container: Container) -> None:
    reads = files.variables_of(container.service)
    bus = ("NIGHTSHIFT_NATS_URL", "NIGHTSHIFT_NATS_PASSWORD_FILE")
    for name in (*bus, f"NIGHTSHIFT_{container.service.upper()}_STORE"):
        assert (name in container.environment) == (name in reads), name


def test_a_gateway_opens_itself_only_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in files.image_environment("gateway").items():
        if name.startswith(OURS):
            monkeypatch.setenv(name, value)
    settings = files.settings_of("gateway")
    assert not getattr(settings.load(), "allow_open")  # noqa: B009
    for container in containers():
        if container.service == "gateway":
            # Published to its own machine by compose; on Nomad a whole network reaches it.
            is_open = "NIGHTSHIFT_GATEWAY_ALLOW_OPEN" in container.environment
            assert is_open == (container.where == "compose")


def test_executors_have_names_of_their_own() -> None:
    names = [
        (one.where, one.environment.get("NIGHTSHIFT_EXECUTOR_NAME", ""))
        for one in containers()
        if one.service == "executor"
    ]
    # A container of compose has its host name, so that a service can be scaled.
    assert sorted(names) == [
        ("compose", ""),
        ("compose", ""),
        ("compose", ""),
        ("nomad", "cuda-0"),
        ("nomad", "simulated-0"),
    ]
