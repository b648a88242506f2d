"""Settings come from the environment; what is unknown or does not fit is named, never shown."""

import importlib
import inspect
from pathlib import Path

import pytest
from pydantic import Field, ValidationError
from pydantic_settings import SettingsConfigDict

import services
from services.kit.process.addresses import parse_bus_urls
from services.kit.process.settings import BusSettings, ServiceSettings, SettingsError

pytestmark = pytest.mark.unit

MOST_SETTINGS = 20
"""Few enough to know; five more than the rule for the store, of whose settings the contract alone
names seven, and four say what lies outside: where blobs are, how much room they may take, and where
the database's password is."""


class PlantSettings(ServiceSettings):
    """Settings of a service that only this test knows."""

    model_config = SettingsConfigDict(env_prefix="NIGHTSHIFT_PLANT_", frozen=True, extra="forbid")

    listen: str = "127.0.0.1:1"
    pots: int = Field(3, gt=0)
    bus_url: str = Field("nats://here", validation_alias="NIGHTSHIFT_BUS_URL")


def all_settings() -> list[type[ServiceSettings]]:
    """Return every service's settings class."""
    found = []
    for file in sorted(Path(services.__path__[0]).glob("*/settings.py")):
        module = importlib.import_module(f"services.{file.parent.name}.settings")
        found += [
            one
            for _, one in inspect.getmembers(module, inspect.isclass)
            if issubclass(one, ServiceSettings) and one not in (ServiceSettings, BusSettings)
        ]
    return found


def test_nothing_set_is_enough() -> None:
    assert PlantSettings.load().pots == 3


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTSHIFT_PLANT_POTS", "7")
    monkeypatch.setenv("NIGHTSHIFT_BUS_URL", "nats://there")
    settings = PlantSettings.load()
    assert (settings.pots, settings.bus_url) == (7, "nats://there")


def test_an_unknown_name_with_the_prefix_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTSHIFT_PLANT_POT", "hunter2")
    with pytest.raises(SettingsError, match=r"NIGHTSHIFT_PLANT_POT;.*NIGHTSHIFT_PLANT_POTS") as got:
        PlantSettings.load()
    assert "hunter2" not in str(got.value)


def test_names_of_other_services_are_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTSHIFT_PLANTER_POTS", "x")
    monkeypatch.setenv("NIGHTSHIFT_WHATEVER", "x")
    PlantSettings.load()


@pytest.mark.parametrize("value", ["hunter2", "-4711", ""])
def test_a_value_that_does_not_fit_is_named_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("NIGHTSHIFT_PLANT_POTS", value)
    with pytest.raises(SettingsError, match="NIGHTSHIFT_PLANT_POTS: ") as got:
        PlantSettings.load()
    assert not value or value not in str(got.value)
    # The cause would be printed with its input in a traceback.
    assert got.value.__suppress_context__
    assert got.value.__cause__ is None


def test_settings_do_not_change() -> None:
    settings = PlantSettings.load()
    with pytest.raises(ValidationError):
        settings.pots = 4


def test_every_service_has_few_settings_and_starts_without_any() -> None:
    found = all_settings()
    assert "StoreSettings" in {one.__name__ for one in found}
    for one in found:
        own = [name for name, field in one.model_fields.items() if field.validation_alias is None]
        assert len(own) <= MOST_SETTINGS, one.__name__
        assert str(one.model_config["env_prefix"]).startswith("NIGHTSHIFT_"), one.__name__
        one.load()


class SharedSettings(ServiceSettings):
    model_config = SettingsConfigDict(
        env_prefix="NIGHTSHIFT_PLANT_", frozen=True, extra="forbid", populate_by_name=True
    )

    pots: int = Field(1, validation_alias="NIGHTSHIFT_POTS")


def test_a_variable_that_services_share_is_named_as_it_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NIGHTSHIFT_POTS", "many")
    with pytest.raises(SettingsError, match=r"(?<!_)NIGHTSHIFT_POTS: "):
        SharedSettings.load()
    monkeypatch.setenv("NIGHTSHIFT_POTS", "3")
    assert SharedSettings.load().pots == 3
    monkeypatch.setenv("NIGHTSHIFT_PLANT_POTS", "4")
    with pytest.raises(SettingsError, match="unknown setting NIGHTSHIFT_PLANT_POTS"):
        SharedSettings.load()


@pytest.mark.parametrize(
    "text",
    ["nats://h:4222", "h", "h:4222,nats://user:hidden@[::1]:1", "tls://h", "wss://h:443/path"],
)
def test_servers_of_the_bus(text: str) -> None:
    assert parse_bus_urls(text) == text.split(",")


@pytest.mark.parametrize(
    "text", ["", " , ", "nats://", "nats://h:port", "http://h:1", "h:99999", "nats://u:hidden@:1"]
)
def test_what_names_no_server_of_the_bus_is_not_shown(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected nats://host:port") as error:
        parse_bus_urls(text)
    assert "hidden" not in str(error.value)


@pytest.mark.parametrize(
    ("service", "name", "value", "says"),
    [
        ("store", "NIGHTSHIFT_STORE_LISTEN", "here", "expected host:port"),
        ("store", "NIGHTSHIFT_NATS_URL", "", "expected nats://host:port"),
        ("scheduler", "NIGHTSHIFT_SCHEDULER_METRICS_LISTEN", "h:99999", "at most 65535"),
        ("executor", "NIGHTSHIFT_EXECUTOR_STORE", ",", "expected host:port"),
        ("executor", "NIGHTSHIFT_EXECUTOR_STORE", "a:1,store..svc:7401", "neither a name nor"),
        ("gateway", "NIGHTSHIFT_GATEWAY_STORE", "my store:7401", "neither a name nor"),
        ("gateway", "NIGHTSHIFT_GATEWAY_LISTEN", "[]:80", "neither a name nor"),
        ("executor", "NIGHTSHIFT_EXECUTOR_MODELS", ",", "names none"),
        ("gateway", "NIGHTSHIFT_GATEWAY_GRPC_LISTEN", "::1:80", "stands in brackets"),
    ],
)
def test_an_address_that_is_none_is_named_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, service: str, name: str, value: str, says: str
) -> None:
    module = importlib.import_module(f"services.{service}.settings")
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=says) as error:
        getattr(module, f"{service.title()}Settings").load()
    assert name in str(error.value)
    assert "Value error" not in str(error.value)
