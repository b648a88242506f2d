"""Settings of the gateway, from `NIGHTSHIFT_GATEWAY_…`."""

import ipaddress
import re
from pathlib import Path
from typing import Final

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from services.kit.process.addresses import split_address
from services.kit.process.settings import Listen, MaybeListen, ServiceSettings, Stores

MAX_WINDOW_SECONDS: Final = 7 * 86_400
"""Chunks on the bus live for 8 days, so that no batch may take longer than 7."""

_WINDOW: Final = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_HOST: Final = re.compile(r"[A-Za-z0-9_.-]+")
_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


class GatewaySettings(ServiceSettings):
    """What may be set; each has a working default."""

    model_config = SettingsConfigDict(
        env_prefix="NIGHTSHIFT_GATEWAY_", frozen=True, extra="forbid", populate_by_name=True
    )

    #: `host:port` of the REST routes; port 0 picks a free one.
    listen: Listen = "127.0.0.1:8000"
    #: `host:port` of the public gRPC services.
    grpc_listen: Listen = "127.0.0.1:8001"
    #: `host:port` of the store, or of several that share a database, separated by commas.
    store: Stores = "127.0.0.1:7401"
    #: Completion windows that a batch may ask for: a comma list of a number and s, m, h or d.
    completion_windows: str = "24h"
    #: Lets an address that other machines can reach be listened on although no key was ever made.
    allow_open: bool = False
    #: Names under which clients reach the gateway without a key, beside localhost, IP addresses and
    #: the one that it listens on: a comma list. Others may be a web page's.
    allowed_hosts: str = ""
    #: Metrics for other machines, `host:port`; empty means that only this one may ask /metrics.
    metrics_listen: MaybeListen = ""
    #: How often a key may call that has no limit of its own; each gateway counts alone.
    requests_per_minute: int | None = Field(None, gt=0)
    #: How long a gateway that stops still takes requests and says at /readyz that it does not:
    #: what a load balancer needs to notice.
    drain_delay_seconds: float = Field(0.0, ge=0, le=60)
    #: The services' shared secret.
    secret_file: Path = Field(
        Path("nightshift-data/secret"), validation_alias="NIGHTSHIFT_SECRET_FILE"
    )

    @field_validator("completion_windows")
    @classmethod
    def _are_windows(cls, value: str) -> str:
        parse_windows(value)
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _are_hosts(cls, value: str) -> str:
        if not all(_HOST.fullmatch(host) for host in _names(value)):
            raise ValueError("expected a comma list of host names without ports, such as gateway")
        return value

    @property
    def hosts(self) -> set[str]:
        """Names under which clients reach the gateway without a key."""
        return {split_address(self.listen)[0], *_names(self.allowed_hosts)}

    @property
    def windows(self) -> dict[str, int]:
        """Completion windows by name, in seconds."""
        return parse_windows(self.completion_windows)

    def exposed_address(self) -> tuple[str, str] | None:
        """Return the setting and the address that other machines can reach; None without any.

        Where `allow_open` is set, whatever is there is meant to be.
        """
        if self.allow_open:
            return None
        for name, address in (("LISTEN", self.listen), ("GRPC_LISTEN", self.grpc_listen)):
            host, _ = split_address(address)
            if not is_loopback(host):
                return f"NIGHTSHIFT_GATEWAY_{name}", address
        return None


def _names(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach `host`; of names only localhost is sure."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_windows(text: str) -> dict[str, int]:
    """Return the windows of a comma list such as `24h,10s`, in seconds, in the order given.

    Raises:
        ValueError: one of them is no window, or longer than 7 days.
    """
    windows: dict[str, int] = {}
    for name in (part.strip() for part in text.split(",")):
        match = _WINDOW.fullmatch(name)
        if match is None:
            raise ValueError("expected a comma list such as 24h,10s (s, m, h or d)")
        seconds = int(match[1]) * _UNIT_SECONDS[match[2]]
        if seconds > MAX_WINDOW_SECONDS:
            raise ValueError("a completion window is at most 7d")
        windows[name] = seconds
    return windows
