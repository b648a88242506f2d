"""API keys as the store knows them, remembered for a moment."""

import asyncio
import hashlib
from collections import OrderedDict
from typing import Final

import prometheus_client

from protos.nightshift.v1 import admin_pb2
from services.gateway.auth import Identity
from services.gateway.callers import network_of
from services.gateway.limits import RequestLimiter, duration
from services.gateway.store import Store
from services.kit.process.clock import Clock
from services.kit.process.log import get_logger
from services.kit.wire.api_keys import Form, form_of
from services.kit.wire.errors import AuthenticationError, RateLimitedError
from services.kit.wire.ids import DEFAULT_PROJECT, ProjectId

_log = get_logger(__name__)

_REFUSED = prometheus_client.Counter(
    "nightshift_refused_keys_total",
    "Requests refused because of their API key, by reason.",
    ["reason"],
)

CACHE_SECONDS: Final = 2.0
"""How long an answer of the store holds: a revoked key is good for this long at most."""

MAX_GOOD: Final = 4_096
"""Good keys that are remembered."""

MAX_OTHERS: Final = 1_024
"""Answers on other keys that are remembered, apart, so that they never push out a good one."""

WRONG_PER_MINUTE: Final = 60
"""Unknown keys that one address may show in a minute before it has to wait."""

LOG_SECONDS: Final = 10.0
"""Refused keys are logged at most this often, with how many there were."""

_ANY_KEY: Final = b""
"""In place of a key's hash: asks about keys in general."""

_MASKED_FROM: Final = 16
"""Characters from which on a wrong key's ends are shown: of a short one they would say too much."""

Answer = admin_pb2.LookUpKeyResponse


class KeyAuth:
    """Takes any key, or none, until the first one is made; from then on a good one is needed."""

    def __init__(self, store: Store, clock: Clock) -> None:
        """Ask `store`; what it says is kept by `clock`."""
        self._store = store
        self._clock = clock
        # Answers, and until when they hold. A good key stays after that: it is asked for again,
        # whoever else shows wrong ones from the same address.
        self._good: OrderedDict[bytes, tuple[Answer, float]] = OrderedDict()
        self._others: OrderedDict[bytes, tuple[Answer, float]] = OrderedDict()
        self._asked: dict[bytes, asyncio.Task[Answer]] = {}
        self._wrong = RequestLimiter(clock)
        self._refusals = 0
        self._logged_at = -LOG_SECONDS

    async def keys_needed(self) -> bool:
        """Tell whether any key was ever made.

        Raises:
            UnavailableError: the store cannot be asked.
        """
        return (await self._answer(_ANY_KEY)).keys_needed

    async def authenticate(self, authorization: str, client: str = "") -> Identity:
        """Return whom an `Authorization` header stands for; empty when none was sent.

        Args:
            authorization: the header.
            client: the address that it came from.

        Raises:
            AuthenticationError: keys are needed, and there is none, or no good one.
            RateLimitedError: too many unknown keys came from that address.
            UnavailableError: the store cannot be asked.
        """
        key = key_of(authorization)
        form = form_of(key)
        if form is not Form.CHECKED:
            general = await self._answer(_ANY_KEY)
            if not general.keys_needed:
                return Identity(project_id=DEFAULT_PROJECT)
            if not key:
                raise AuthenticationError(
                    "You didn't provide an API key. You need to provide your API key in an "
                    "Authorization header using Bearer auth (i.e. Authorization: Bearer YOUR_KEY)."
                )
            if form is Form.MALFORMED or general.all_have_checksums:
                self._note_refusal("malformed", key, client)
                raise _incorrect(key)
        sha256 = hashlib.sha256(key.encode()).digest()
        if sha256 not in self._good:
            self._check_wrong_ones(key, client)
        answer = await self._answer(sha256)
        if not answer.keys_needed:
            return Identity(project_id=DEFAULT_PROJECT)
        if not answer.HasField("key"):
            self._wrong.take(network_of(client), WRONG_PER_MINUTE)
            self._note_refusal("unknown", key, client)
            raise _incorrect(key)
        found = answer.key
        limited = found.HasField("requests_per_minute")
        return Identity(
            project_id=ProjectId(found.project_id),
            key_id=found.id,
            requests_per_minute=found.requests_per_minute if limited else None,
        )

    def _check_wrong_ones(self, key: str, client: str) -> None:
        """Refuse a key that was not seen before, where too many of those were wrong."""
        wait = self._wrong.wait_seconds(network_of(client), WRONG_PER_MINUTE)
        if wait > 0:
            self._note_refusal("too_many", key, client)
            raise RateLimitedError(
                f"Too many wrong API keys came from your address. Please try again in "
                f"{duration(wait)}, with a key of `nightshift keys create`.",
                code="rate_limit_exceeded",
                retry_after_seconds=wait,
            )

    def _note_refusal(self, reason: str, key: str, client: str) -> None:
        _REFUSED.labels(reason).inc()
        self._refusals += 1
        now = self._clock.monotonic()
        if now - self._logged_at >= LOG_SECONDS:
            _log.warning(
                "keys_refused",
                count=self._refusals,
                last_reason=reason,
                last_client=client,
                last_shown=masked(key),
            )
            self._refusals, self._logged_at = 0, now

    async def _answer(self, sha256: bytes) -> Answer:
        """Return what the store says of a key; callers at the same time share one call."""
        now = self._clock.monotonic()
        for answers in (self._good, self._others):
            if sha256 in answers and now < answers[sha256][1]:
                return answers[sha256][0]
        task = self._asked.get(sha256)
        if task is None:
            task = self._asked[sha256] = asyncio.create_task(self._ask(sha256))
            task.add_done_callback(lambda done: self._asked_for(sha256, done))
        # One caller that goes away must not end the call of the others.
        return await asyncio.shield(task)

    async def _ask(self, sha256: bytes) -> Answer:
        until = self._clock.monotonic() + CACHE_SECONDS
        answer = await self._store.look_up_key(sha256)
        for answers in (self._good, self._others):
            answers.pop(sha256, None)
        answers, most = (
            (self._good, MAX_GOOD) if answer.HasField("key") else (self._others, MAX_OTHERS)
        )
        answers[sha256] = answer, until
        while len(answers) > most:
            answers.popitem(last=False)
        return answer

    def _asked_for(self, sha256: bytes, done: asyncio.Task[Answer]) -> None:
        del self._asked[sha256]
        if not done.cancelled():
            # Those who waited may all have gone; else its fault would be logged as unseen.
            done.exception()


def _incorrect(key: str) -> AuthenticationError:
    return AuthenticationError(
        f"Incorrect API key provided: {masked(key)}. Your operator makes one with "
        "`nightshift keys create`.",
        code="invalid_api_key",
    )


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
