"""Settings: what is refused, and that the message says what to change."""

import pytest

from services.gateway.settings import (
    GatewaySettings,
    is_loopback,
    parse_windows,
)
from services.kit.process.addresses import split_address
from services.kit.process.settings import SettingsError


def test_defaults_work() -> None:
    settings = GatewaySettings.load()
    assert settings.exposed_address() is None
    assert settings.windows == {"24h": 86_400}


@pytest.mark.parametrize(
    ("text", "windows"),
    [
        ("24h", {"24h": 86_400}),
        ("24h, 10s", {"24h": 86_400, "10s": 10}),
        ("30m,7d", {"30m": 1_800, "7d": 604_800}),
    ],
)
def test_windows(text: str, windows: dict[str, int]) -> None:
    assert parse_windows(text) == windows


@pytest.mark.parametrize("text", ["", "24", "h", "0h", "8d", "1w", "24h,", "-1h", "1.5h", "٣h"])
def test_bad_windows(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTSHIFT_GATEWAY_COMPLETION_WINDOWS", text)
    with pytest.raises(SettingsError, match="NIGHTSHIFT_GATEWAY_COMPLETION_WINDOWS"):
        GatewaySettings.load()


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("[::1]:80", "::1", 80),
        ("localhost:65535", "localhost", 65535),
    ],
)
def test_addresses(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)
    assert is_loopback(host)


@pytest.mark.parametrize("address", ["", "x", ":1", "x:", "x:y", "::1:80", "x:65536", "x:-1"])
def test_bad_addresses(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTSHIFT_GATEWAY_LISTEN", address)
    with pytest.raises(SettingsError, match="NIGHTSHIFT_GATEWAY_LISTEN"):
        GatewaySettings.load()


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1", "example.com", "localhost.x"])
@pytest.mark.parametrize("name", ["listen", "grpc_listen"])
def test_open_address_is_told_unless_it_is_allowed(name: str, host: str) -> None:
    settings = GatewaySettings(**{name: f"{host}:8000"})  # type: ignore[arg-type]
    setting = f"NIGHTSHIFT_GATEWAY_{name.upper()}"
    assert settings.exposed_address() == (setting, f"{host}:8000")
    allowed = GatewaySettings(allow_open=True, **{name: f"{host}:8000"})  # type: ignore[arg-type]
    assert allowed.exposed_address() is None


def test_unknown_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTSHIFT_GATEWAY_LISTNE", "x")
    with pytest.raises(SettingsError, match="LISTNE"):
        GatewaySettings.load()
