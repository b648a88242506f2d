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
        known = {f"{prefix}{name.upper()}" for name in cls.model_fields}
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
                f"{prefix}{'_'.join(str(part) for part in fault['loc']).upper()}: {fault['msg']}"
                for fault in error.errors(include_input=False, include_url=False)
            )
            raise SettingsError(f"settings do not fit: {faults}") from None
