"""What every route and servicer of the gateway needs, made once in `main`."""

from dataclasses import dataclass

from services.gateway.auth import Auth, Caller
from services.gateway.clients import Store
from services.kit.ids import IdGenerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Dependencies of routes and servicers.

    Attributes:
        store: the store's public services.
        auth: keys to projects.
        windows: completion windows by name, in seconds.
        new_id: source of request ids.
    """

    store: Store
    auth: Auth
    windows: dict[str, int]
    new_id: IdGenerator

    def new_request_id(self) -> str:
        """Return an id for a request that has just arrived."""
        return f"req_{self.new_id()}"

    async def caller(self, authorization: str, request_id: str) -> Caller:
        """Return who calls; REST and gRPC alike.

        Raises:
            AuthenticationError: no key, or a wrong one.
        """
        identity = await self.auth.authenticate(authorization)
        return Caller(project_id=identity.project_id, request_id=request_id, key_id=identity.key_id)
