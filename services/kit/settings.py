"""Settings from the environment: one frozen class a service, unknown names refused."""

import os
from typing import Any, Self

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict


class SettingsError(Exception):
    """A setting is unknown or does not fit; the message says which and what to change."""


class ServiceSettings(BaseSettings):
    """Base of every service's settings. Subclasses set `env_prefix`; units are in the names."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

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
                f"{_variable(prefix, fault['loc'])}: {fault['msg']}"
                for fault in error.errors(include_input=False, include_url=False)
            )
            raise SettingsError(f"settings do not fit: {faults}") from None


def _variable(prefix: str, place: tuple[int | str, ...]) -> str:
    """Return the variable of a faulty field; one that services share has its whole name already."""
    name = "_".join(str(part) for part in place).upper()
    return name if name.startswith("NIGHTSHIFT_") else f"{prefix}{name}"
