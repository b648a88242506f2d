"""Who is calling: the one seam from an API key to a project."""

from dataclasses import dataclass
from typing import Protocol

from services.kit.wire.ids import ProjectId


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whom an API key stands for.

    Attributes:
        project_id: owner of all that it may see.
        key_id: the key shown; None while none is configured.
        requests_per_minute: how often it may call; None means without limit.
    """

    project_id: ProjectId
    key_id: str | None = None
    requests_per_minute: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """On whose behalf a request runs, and under which id it is logged.

    Attributes:
        project_id: owner of all that it may see.
        request_id: `req_` and 32 hex digits.
        key_id: the key shown; None while none is configured.
        client: the address that it came from.
        idempotency_key: under which it creates a file or batch; None where it sent none.
    """

    project_id: ProjectId
    request_id: str
    key_id: str | None = None
    client: str = ""
    idempotency_key: str | None = None


class Auth(Protocol):
    """Turns what a client shows into whom it stands for."""

    async def keys_needed(self) -> bool:
        """Tell whether any key was ever made."""
        ...

    async def authenticate(self, authorization: str, client: str = "") -> Identity:
        """Return the owner of an `Authorization` header; empty when none was sent.

        Raises:
            AuthenticationError: no key, or a wrong one.
            RateLimitedError: too many wrong ones came from the address `client`.
        """
        ...
