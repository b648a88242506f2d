"""What every route and servicer of the gateway needs, made once in `main`."""

from dataclasses import dataclass, field

import structlog

from services.gateway import key_metrics
from services.gateway.auth import Auth, Caller
from services.gateway.batch_watch import Watchers
from services.gateway.limits import Allowance, RequestLimiter
from services.gateway.sites import Sites
from services.gateway.store import Store
from services.kit.wire.ids import IdGenerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Dependencies of routes and servicers.

    Attributes:
        store: the store's public services.
        auth: keys to projects.
        limiter: counts the requests of each key.
        requests_per_minute: limit of a key that has none of its own; None means without limit.
        windows: completion windows by name, in seconds.
        new_id: source of request ids.
        sites: the web pages that may call without a key.
        watchers: streams of events, which end when the gateway drains.
    """

    store: Store
    auth: Auth
    limiter: RequestLimiter
    requests_per_minute: int | None = None
    windows: dict[str, int]
    new_id: IdGenerator
    sites: Sites = field(default_factory=Sites)
    watchers: Watchers = field(default_factory=Watchers)

    def new_request_id(self) -> str:
        """Return an id for a request that has just arrived."""
        return f"req_{self.new_id()}"

    async def admit(
        self, authorization: str, request_id: str, client: str
    ) -> tuple[Caller, Allowance | None]:
        """Return who calls and what that leaves of its limit; REST and gRPC alike.

        The request may go on only where `Allowance.check` passes; None means without limit. What
        is logged from then on has project and key. `key_metrics.ended` is called at its end.

        Raises:
            AuthenticationError: no key, or a wrong one.
            RateLimitedError: too many wrong ones came from the address `client`.
        """
        identity = await self.auth.authenticate(authorization, client)
        caller = Caller(
            project_id=identity.project_id,
            request_id=request_id,
            key_id=identity.key_id,
            client=client,
        )
        structlog.contextvars.bind_contextvars(project=caller.project_id)
        if caller.key_id is not None:
            structlog.contextvars.bind_contextvars(key=caller.key_id)
            key_metrics.began(caller.key_id)
        per_minute = identity.requests_per_minute or self.requests_per_minute
        if identity.key_id is None or per_minute is None:
            return caller, None
        return caller, self.limiter.take(identity.key_id, per_minute)
