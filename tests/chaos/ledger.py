"""What a client was told, and the client that was told it: any gateway, ordinary retries.

Whatever stands here was acknowledged, so it must be there at the end.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import openai
from openai import AsyncOpenAI
from openai.types import Batch

from tests.chaos.workload import Order
from tests.kit.batches import jsonl

T = TypeVar("T")

TRY_SECONDS: Final = 10.0
"""What one try may take: whoever does not answer is frozen, and another may be there."""
CALL_SECONDS: Final = 90.0
"""Bound on asking again, far above the longest fault."""
PAUSE_SECONDS: Final = 0.3

RETRIED: Final = (openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError)


class Violation(AssertionError):
    """Something that must not be, whatever dies."""


@dataclass(slots=True, kw_only=True)
class Entry:
    """One batch, as far as its client knows.

    Attributes:
        key: its idempotency key, which stands in its metadata too.
        order: what was asked for.
        file_id: of its input, once that is acknowledged.
        batch_id: once it is acknowledged.
        asked: whether it may be there although that was never acknowledged.
        cancel_acknowledged: whether a cancel was answered with 200.
        in_parts: whether its input goes up in parts.
        deleted: its output file, once it was looked at and its deletion acknowledged.
    """

    key: str
    order: Order
    file_id: str = ""
    batch_id: str = ""
    asked: bool = False
    cancel_acknowledged: bool = False
    in_parts: bool = False
    deleted: str = ""


@dataclass(slots=True)
class Ledger:
    """All entries of a round, and how its calls went."""

    entries: list[Entry] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    """Tries by how they ended: `ok`, `connection`, `timeout`, or a status."""


class Client:
    """The official client, at any of several gateways, asking again as users do."""

    def __init__(self, base_urls: Sequence[str], rng: random.Random, ledger: Ledger) -> None:
        """Open nothing yet.

        Args:
            base_urls: of the gateways.
            rng: chooses among them.
            ledger: told how each try ended.
        """
        self._clients = [
            AsyncOpenAI(base_url=url, api_key="x", max_retries=0, timeout=TRY_SECONDS)
            for url in base_urls
        ]
        self._rng = rng
        self._ledger = ledger

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(client.close() for client in self._clients))

    async def ask(self, call: Callable[[AsyncOpenAI], Awaitable[T]]) -> T:
        """Call once, at one of the gateways; raises what it raises."""
        client = self._rng.choice(self._clients)
        try:
            found = await call(client)
        except openai.APITimeoutError:
            self._ledger.calls["timeout"] += 1
            raise
        except openai.APIConnectionError:
            self._ledger.calls["connection"] += 1
            raise
        except openai.APIStatusError as refused:
            self._ledger.calls[str(refused.status_code)] += 1
            if refused.status_code == 500:
                # A fault that was foreseen is 503, with the time after which to try again.
                raise Violation(f"500 for {refused.request.url}: {refused.body}") from refused
            raise
        self._ledger.calls["ok"] += 1
        return found

    async def insist(self, call: Callable[[AsyncOpenAI], Awaitable[T]]) -> T:
        """Call until it is answered.

        Raises:
            Violation: not within `CALL_SECONDS`.
        """
        deadline = time.monotonic() + CALL_SECONDS
        while True:
            try:
                return await self.ask(call)
            except RETRIED as fault:
                if time.monotonic() > deadline:
                    raise Violation(f"no answer in {CALL_SECONDS:.0f} s: {fault!r}") from fault
            await asyncio.sleep(PAUSE_SECONDS)

    # --- what a batch takes -----------------------------------------------------------------------

    async def submit(self, entry: Entry) -> Batch:
        """Upload and create; each is one thing however often it must be asked for."""
        order = entry.order
        content = jsonl(order.lines)
        upload = self._upload_in_parts if entry.in_parts else self._upload
        entry.file_id = await upload(content, f"{entry.key}-file")
        entry.asked = True
        batch = await self.insist(
            lambda client: client.batches.create(
                input_file_id=entry.file_id,
                endpoint=order.endpoint,  # type: ignore[arg-type]
                completion_window=order.window,  # type: ignore[arg-type]
                metadata={"key": entry.key},
                extra_headers={"Idempotency-Key": entry.key},
            )
        )
        entry.batch_id = batch.id
        return batch

    async def _upload(self, content: bytes, key: str) -> str:
        file = await self.insist(
            lambda client: client.files.create(
                file=("in.jsonl", content),
                purpose="batch",
                extra_headers={"Idempotency-Key": key},
            )
        )
        return file.id

    async def _upload_in_parts(self, content: bytes, _key: str) -> str:
        """Upload it in two parts, cut anywhere; what is sent twice is named once."""
        upload = await self.insist(
            lambda client: client.uploads.create(
                bytes=len(content),
                filename="in.jsonl",
                mime_type="application/jsonl",
                purpose="batch",
            )
        )
        cut = self._rng.randrange(1, len(content))
        parts = []
        for piece in (content[:cut], content[cut:]):

            async def add(client: AsyncOpenAI, piece: bytes = piece) -> str:
                return (await client.uploads.parts.create(upload.id, data=piece)).id

            parts.append(await self.insist(add))
        done = await self.insist(lambda client: client.uploads.complete(upload.id, part_ids=parts))
        if done.file is None:
            raise Violation(f"completed without a file: {done}")
        return done.file.id

    async def delete_output(self, entry: Entry, file_id: str) -> None:
        """Delete its output file; a try whose answer was lost may have done so before."""
        with contextlib.suppress(openai.NotFoundError):
            await self.insist(lambda client: client.files.delete(file_id))
        entry.deleted = file_id

    async def cancel(self, entry: Entry) -> None:
        """Cancel it; one that has ended meanwhile says so."""
        try:
            await self.insist(lambda client: client.batches.cancel(entry.batch_id))
        except openai.ConflictError:
            return
        entry.cancel_acknowledged = True
