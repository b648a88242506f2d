"""Settings from the environment: one frozen class a service, unknown names refused."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.kit.process.addresses import parse_addresses, parse_bus_urls, split_address


class SettingsError(Exception):
    """A setting is unknown or does not fit; the message says which and what to change."""


def _that(reads: Callable[[str], object], *, may_be_empty: bool = False) -> AfterValidator:
    """Return what refuses a text that `reads` cannot read, and leaves others as they are."""

    def check(text: str) -> str:
        if text or not may_be_empty:
            reads(text)
        return text

    return AfterValidator(check)


Listen = Annotated[str, _that(split_address)]
"""`host:port` to listen on; port 0 picks a free one."""
MaybeListen = Annotated[str, _that(split_address, may_be_empty=True)]
"""So, or empty for nowhere."""
Stores = Annotated[str, _that(parse_addresses)]
"""`host:port` of a store, or of several that share a database, separated by commas."""
BusUrl = Annotated[str, _that(parse_bus_urls)]
"""`nats://host:port` of a NATS server, or of several that form a cluster, separated by commas."""

MaybePath = Annotated[Path | None, BeforeValidator(lambda value: value or None)]
"""A file; empty means none."""


class ServiceSettings(BaseSettings):
    """Base of every service's settings. Subclasses set `env_prefix`; units are in the names."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def load(cls, **overrides: Any) -> Self:
        """Read the environment.

        Raises:
            SettingsError: a variable with this service's prefix is unknown, or a value is wrong.
        """
        prefix = str(cls.model_config.get("env_prefix", "")).upper()
        known = {
            f"{prefix}{name.upper()}"
            for name, field in cls.model_fields.items()
            if field.validation_alias is None
        }
        unknown = sorted(
            name for name in os.environ if prefix and name.startswith(prefix) and name not in known
        )
        if unknown:
            raise SettingsError(
                f"unknown setting {unknown[0]}; known ones are {', '.join(sorted(known))}"
            )
        try:
            return cls(**overrides)
        except ValidationError as error:
            # The values stay out of the message: one of them may be a secret.
            faults = "; ".join(
                f"{_variable(prefix, fault['loc'])}{fault['msg'].removeprefix('Value error, ')}"
                for fault in error.errors(include_input=False, include_url=False)
            )
            raise SettingsError(f"settings do not fit: {faults}") from None


class BusSettings(ServiceSettings):
    """What services that use the bus have in common."""

    nats_url: BusUrl = Field("nats://127.0.0.1:4222", validation_alias="NIGHTSHIFT_NATS_URL")
    #: Servers that keep each stream: 1, or 3 with a cluster of three; the same in every service.
    nats_replicas: int = Field(1, ge=1, le=5, validation_alias="NIGHTSHIFT_NATS_REPLICAS")
    #: Empty means the name of the service, where there is a password.
    nats_user: str = Field("", validation_alias="NIGHTSHIFT_NATS_USER")
    #: None means what `nats_url` holds, or nothing.
    nats_password_file: MaybePath = Field(None, validation_alias="NIGHTSHIFT_NATS_PASSWORD_FILE")


def _variable(prefix: str, place: tuple[int | str, ...]) -> str:
    """Return how a faulty field is told; one that services share has its whole name already."""
    if not place:
        # Of several together; the text names them.
        return ""
    name = "_".join(str(part) for part in place).upper()
    return f"{name if name.startswith('NIGHTSHIFT_') else f'{prefix}{name}'}: "
