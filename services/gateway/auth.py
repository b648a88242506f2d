"""Who is calling: the one seam from an API key to a project."""

from dataclasses import dataclass
from typing import Protocol

from services.kit.ids import DEFAULT_PROJECT, ProjectId


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a request runs, and under which id it is logged.

    Attributes:
        project_id: owner of all that it may see.
        request_id: `req_` and 32 hex digits.
    """

    project_id: ProjectId
    request_id: str


class Auth(Protocol):
    """Turns what a client shows into its project."""

    def project_of(self, authorization: str) -> ProjectId:
        """Return the project of an `Authorization` header; empty when none was sent.

        Raises:
            AuthenticationError: no key, or a wrong one.
        """
        ...


class OpenAccess:
    """No key is configured: any key, or none, is taken, and all belongs to one project."""

    def project_of(self, authorization: str) -> ProjectId:
        """Return the default project."""
        return DEFAULT_PROJECT
