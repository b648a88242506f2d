"""An answer of any size ends its line once, and its neighbours keep theirs; executor and store."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.attempts import Attempt, Attempts
from services.executor.engines.base import Usage
from services.executor.lines.reporter import Reporter
from services.executor.store_client import StoreClient
from services.kit.messages.bus import Delivery
from services.kit.process.clock import SystemClock
from tests.integration.store_work.harness import SECRET, Store, running
from tests.integration.store_work.worker import POOL, result

pytestmark = pytest.mark.integration

LIMIT = 64 * 1024
"""The least that may be set."""
ENVELOPE = len(result("batch_x", 0, answer=""))

# Around the limit, the row's size, a message's, and several of them.
_near = st.sampled_from([LIMIT, 256 * 1024, 1024 * 1024, 2 * 1024 * 1024])
sizes = st.integers(0, 200) | st.builds(
    lambda at, by: at - ENVELOPE + by, _near, st.integers(-2, 2)
)


async def attempt_on(store: Store, client: StoreClient, attempts: Attempts, lines: int) -> Attempt:
    """Return an open attempt on a new batch."""
    (dispatch,) = await store.cut((await store.batch(lines), lines))
    opened = (await client.open_attempt(dispatch.chunk_id, dispatch.dispatch, 1)).opened
    attempt = attempts.add(Delivery(cast(Any, None), dispatch, 1), 0.0)
    attempt.token = opened.token
    return attempt


async def check(store: Store, told: int, batches: Sequence[Sequence[int]]) -> None:
    """Send answers of these sizes, of several batches, over one stream, and look at their files.

    `told`: the limit that the executor goes by, which may be another one than the store's.
    """
    client = StoreClient(store.channel, secret=SECRET, executor_id="e0", incarnation="i0")
    await client.register(
        pool_id=POOL, models=(), endpoints=(), context_length=None, engine_revision=""
    )
    assert client.max_result_bytes == LIMIT
    client.max_result_bytes = told
    attempts = Attempts()
    given_up: list[str] = []
    reporter = Reporter(
        store=client,
        attempts=attempts,
        clock=SystemClock(),
        chance=lambda: 0.0,
        on_durable=lambda _attempt: None,
        on_sealed=lambda _attempt: None,
        on_refused=lambda _attempt, why: given_up.append(why),
    )
    sending = asyncio.create_task(reporter.run())
    opened = [await attempt_on(store, client, attempts, len(each)) for each in batches]
    texts = [
        [result(one.dispatch.batch_id, line, answer="x" * size) for line, size in enumerate(each)]
        for one, each in zip(opened, batches, strict=True)
    ]
    for line in range(max(map(len, batches))):
        for attempt, mine in zip(opened, texts, strict=True):
            if line < len(mine):
                reporter.add(attempt, line, mine[line], 0, Usage(1, 0, 1, 0))
    assert await reporter.flush(opened, 60.0)
    assert not given_up
    assert not reporter._pending_bytes
    sending.cancel()
    await store.turn()
    for attempt, mine in zip(opened, texts, strict=True):
        batch = await store.get(attempt.dispatch.batch_id)
        fits = [text for text in mine if len(text) <= LIMIT]
        assert (batch.request_counts.completed, batch.request_counts.failed) == (
            len(fits),
            len(mine) - len(fits),
        )
        if fits:
            assert await store.download(batch.output_file_id) == b"".join(fits)
        _, errors = await store.end_files(batch.id)
        for line, text in zip(errors, [each for each in mine if len(each) > LIMIT], strict=True):
            assert line["error"]["code"] == "result_too_large"
            assert (
                f"has {len(text)} bytes. A result may have at most {LIMIT}"
                in (line["error"]["message"])
            )


async def test_an_answer_of_any_size_ends_its_line_and_no_other(tmp_path: Path) -> None:
    async with running(tmp_path, max_result_bytes=LIMIT, max_line_bytes=LIMIT) as store:
        loop = asyncio.get_running_loop()

        @settings(max_examples=6, deadline=None)
        @given(
            told=st.sampled_from([LIMIT, 1024 * LIMIT]),
            batches=st.lists(st.lists(sizes, min_size=1, max_size=4), min_size=1, max_size=2),
        )
        def holds(told: int, batches: list[list[int]]) -> None:
            asyncio.run_coroutine_threadsafe(check(store, told, batches), loop).result(120)

        await asyncio.to_thread(holds)
