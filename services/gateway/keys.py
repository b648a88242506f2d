"""API keys as the store knows them, remembered for a moment."""

import asyncio
import hashlib
from collections import OrderedDict
from typing import Final

from protos.nightshift.v1 import admin_pb2
from services.gateway.auth import Identity
from services.gateway.clients import Store
from services.kit.clock import Clock
from services.kit.errors import AuthenticationError
from services.kit.ids import DEFAULT_PROJECT, ProjectId

CACHE_SECONDS: Final = 2.0
"""How long an answer of the store holds: a revoked key is good for this long at most."""

MAX_CACHED: Final = 4_096
"""Keys that are remembered, wrong ones included."""

_MASKED_FROM: Final = 16
"""Characters from which on a wrong key's ends are shown: of a short one they would say too much."""

Answer = admin_pb2.LookUpKeyResponse


class KeyAuth:
    """Takes any key, or none, until the first one is made; from then on a good one is needed."""

    def __init__(self, store: Store, clock: Clock) -> None:
        """Ask `store`; what it says is kept by `clock`."""
        self._store = store
        self._clock = clock
        self._answers: OrderedDict[bytes, tuple[asyncio.Task[Answer], float]] = OrderedDict()

    async def authenticate(self, authorization: str) -> Identity:
        """Return whom an `Authorization` header stands for; empty when none was sent.

        Raises:
            AuthenticationError: keys are needed, and there is none, or no good one.
            UnavailableError: the store cannot be asked.
        """
        key = key_of(authorization)
        answer = await self._answer(hashlib.sha256(key.encode()).digest() if key else b"")
        if not answer.keys_needed:
            return Identity(project_id=DEFAULT_PROJECT)
        if not key:
            raise AuthenticationError(
                "You didn't provide an API key. You need to provide your API key in an "
                "Authorization header using Bearer auth (i.e. Authorization: Bearer YOUR_KEY)."
            )
        if not answer.HasField("key"):
            raise AuthenticationError(
                f"Incorrect API key provided: {masked(key)}. Your operator makes one with "
                "`nightshift keys create`.",
                code="invalid_api_key",
            )
        found = answer.key
        limited = found.HasField("requests_per_minute")
        return Identity(
            project_id=ProjectId(found.project_id),
            key_id=found.id,
            requests_per_minute=found.requests_per_minute if limited else None,
        )

    async def _answer(self, sha256: bytes) -> Answer:
        """Return what the store says of a key; callers at the same time share one call."""
        now = self._clock.monotonic()
        task, until = self._answers.get(sha256, (None, 0.0))
        if task is None or now >= until:
            self._answers.pop(sha256, None)
            task = asyncio.create_task(self._store.look_up_key(sha256))
            task.add_done_callback(lambda done: self._forget_failed(sha256, done))
            self._answers[sha256] = task, now + CACHE_SECONDS
            while len(self._answers) > MAX_CACHED:
                self._answers.popitem(last=False)
        # One caller that goes away must not end the call of the others.
        return await asyncio.shield(task)

    def _forget_failed(self, sha256: bytes, done: asyncio.Task[Answer]) -> None:
        failed = done.cancelled() or done.exception() is not None
        if failed and self._answers.get(sha256, (None,))[0] is done:
            del self._answers[sha256]


def key_of(authorization: str) -> str:
    """Return the key of an `Authorization` header; empty where it shows none."""
    scheme, _, key = authorization.strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def masked(key: str) -> str:
    """Return a key so that its owner knows which it was, and nobody else can use it."""
    if len(key) < _MASKED_FROM:
        return "*" * 8
    ends = key[:3], key[-4:]
    return "********".join(
        "".join(c if c.isascii() and c.isprintable() else "?" for c in end) for end in ends
    )
