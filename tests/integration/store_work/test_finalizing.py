"""End files: every line once, in input order, in bounded memory, whatever happens on the way."""

import asyncio
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import batches_pb2, work_pb2
from services.store.blobs.base import BlobMissingError
from services.store.domain.retry_budget import SUSPECT_TRIES
from services.store.ending.finalizer import Announced
from services.store.tables.core import (
    attempts,
    batches,
    bit_blocks,
    blobs,
    chunks,
    files,
    outbox,
    segments,
)
from tests.integration.store_work.harness import Store, running
from tests.integration.store_work.worker import frame, result
from tests.kit.eventually import eventually
from tests.kit.store import chat_line

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CANCELLED = batches_pb2.BATCH_STATUS_CANCELLED
COMPLETED = batches_pb2.BATCH_STATUS_COMPLETED
FINALIZING = batches_pb2.BATCH_STATUS_FINALIZING
MIB = 1024 * 1024


async def open_all(store: Store, batch_id: str, lines: int) -> str:
    """Cut a batch into one chunk and return the token of an attempt on it."""
    (dispatch,) = await store.cut((batch_id, lines))
    return (await store.open(dispatch)).token


async def test_shuffled_results_of_several_blocks_come_out_in_input_order(store: Store) -> None:
    lines = 9_000
    batch_id = await store.batch(lines)
    token = await open_all(store, batch_id, lines)
    chance = random.Random(7)
    order = chance.sample(range(lines), lines)
    failed = set(chance.sample(range(lines), 700))
    never = set(order[-500:])
    frames = []
    at = 0
    while at < lines - 500:
        count = min(chance.randint(1, 400), lines - 500 - at)
        frames.append(
            frame(token, batch_id, order[at : at + count], failed=failed, number=len(frames) + 1)
        )
        at += count
    assert sum(ack.accepted for ack in await store.append(*frames)) == lines - 500
    await store.cancel(batch_id)
    await store.hand_back(token)
    await store.turn()

    batch = await store.get(batch_id)
    assert batch.status == CANCELLED
    assert batch.request_counts == batches_pb2.RequestCounts(
        total=lines, completed=lines - 500 - len(failed - never), failed=len(failed - never)
    )
    output, error = await store.end_files(batch_id)
    good = [line for line in range(lines) if line not in failed | never]
    assert [line["custom_id"] for line in output] == [f"r{line}" for line in good]
    assert [line["custom_id"] for line in error] == [
        f"r{line}" for line in range(lines) if line in failed | never
    ]
    unanswered = {line["custom_id"] for line in error if line["response"] is None}
    assert unanswered == {f"r{line}" for line in never}


async def test_a_segment_across_the_border_of_two_blocks_gives_both_their_lines(
    store: Store,
) -> None:
    lines = 4_100
    batch_id = await store.batch(lines)
    token = await open_all(store, batch_id, lines)
    border = [4_095, 4_096]
    others = [line for line in range(lines) if line not in border]
    assert await store.finish(token, border, batch_id) == 2
    assert await store.finish(token, others, batch_id) == lines - 2
    await store.turn()
    output, _ = await store.end_files(batch_id)
    assert [line["custom_id"] for line in output] == [f"r{line}" for line in range(lines)]


async def test_memory_does_not_grow_with_the_results(store: Store) -> None:
    lines = 2_000
    batch_id = await store.batch(lines)
    token = await open_all(store, batch_id, lines)
    order = random.Random(3).sample(range(lines), lines)
    # 200 small segments over the whole batch, and long results between them: 64 MiB in all.
    for start in range(0, lines, 10):
        small = frame(token, batch_id, order[start : start + 9], answer="s" * 20_000)
        long = frame(token, batch_id, [order[start + 9]], answer="l" * 140_000)
        acks = await store.append(small, long)
        assert [ack.accepted for ack in acks] == [9, 1]
    tracemalloc.start()
    try:
        await store.finalizer._finalize_all()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 * MIB
    batch = await store.get(batch_id)
    assert batch.status == COMPLETED
    (row,) = await store.sql(sa.select(files.c.parts).where(files.c.id == batch.output_file_id))
    sizes = [size for _, size in row.parts]
    assert sum(sizes) > 60 * MIB
    assert all(size >= 8 * MIB for size in sizes[:-1])
    assert len(sizes) > 2
    content = await store.download(batch.output_file_id)
    longs = {order[start + 9] for start in range(0, lines, 10)}
    at = 0
    for line in range(lines):
        answer = "l" * 140_000 if line in longs else "s" * 20_000
        expected = result(batch_id, line, answer=answer)
        assert content[at : at + len(expected)] == expected
        at += len(expected)
    assert at == len(content)


async def test_one_result_larger_than_a_part(store: Store) -> None:
    batch_id = await store.batch(2)
    token = await open_all(store, batch_id, 2)
    long = frame(token, batch_id, [0], answer="x" * (20 * MIB))
    pieces = [
        work_pb2.AppendResultsRequest(
            token=token,
            frame=1,
            records=b"" if start else long.records,
            payload=long.payload[start : start + MIB],
            more=start + MIB < len(long.payload),
        )
        for start in range(0, len(long.payload), MIB)
    ]
    await store.append(*pieces)
    await store.finish(token, [1], batch_id, failed=[1])
    tracemalloc.start()
    try:
        await store.finalizer._finalize_all()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * MIB
    batch = await store.get(batch_id)
    content = await store.download(batch.output_file_id)
    assert content == result(batch_id, 0, answer="x" * (20 * MIB))


async def test_what_only_running_needed_is_dropped_once_a_batch_has_ended(store: Store) -> None:
    batch_id = await store.batch(300)
    other = await store.batch(2)
    token = await open_all(store, batch_id, 300)
    for line in range(0, 300, 2):
        answer = "x" * (300_000 if line % 100 == 0 else 10)
        await store.finish(token, [line, line + 1], batch_id, answer=answer)
    kept = await open_all(store, other, 2)
    await store.finish(kept, [0], other)
    await store.finalizer._finalize_all()
    assert (await store.get(batch_id)).status == COMPLETED
    assert len(await store.sql(sa.select(segments.c.id))) == 151

    await store.turn()
    for table in (segments, bit_blocks, attempts, chunks):
        owners = await store.sql(sa.select(table.c.batch_id).distinct())
        assert [row.batch_id for row in owners] == [other]
    await store.sweeper.run_once()
    names = [row.name for row in await store.sql(sa.select(blobs.c.name))]
    assert not [name for name in names if "/segment/" in name]
    on_disk = sorted(
        str(path.relative_to(store.store.data / "blobs"))
        for path in (store.store.data / "blobs").rglob("*")
        if path.is_file()
    )
    assert on_disk == sorted(names)
    assert await store.download((await store.get(batch_id)).output_file_id)


async def test_a_store_that_died_while_finalizing_does_it_once_more(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        batch_id = await store.batch(3)
        token = await open_all(store, batch_id, 3)
        await store.finish(token, [0, 1, 2], batch_id, failed=[1])
        ((row, part),) = await store.finalizer._claim(1)
        await store.finalizer._write(row, "output", Announced([part]))
        assert (await store.get(batch_id)).status == FINALIZING
    async with running(tmp_path) as store:
        await store.turn()
        assert (await store.get(batch_id)).status == COMPLETED
        output, error = await store.end_files(batch_id)
        assert [line["custom_id"] for line in output + error] == ["r0", "r2", "r1"]
        assert (
            len(await store.sql(sa.select(files.c.id).where(files.c.of_batch_id == batch_id))) == 2
        )


async def test_who_lost_the_lease_ends_nothing(store: Store) -> None:
    batch_id = await store.batch(1)
    token = await open_all(store, batch_id, 1)
    await store.finish(token, [0], batch_id)
    ((row, part),) = await store.finalizer._claim(1)
    await store.context.db.write(
        "test.step",
        lambda connection: connection.execute(batches.update().values(finalize_holder="other")),
    )
    await store.finalizer._finalize(row, part)
    assert (await store.get(batch_id)).status == FINALIZING
    assert await store.sql(sa.select(files.c.id).where(files.c.of_batch_id == batch_id)) == []


async def test_a_failure_holds_up_no_other_batch_and_is_tried_again(store: Store) -> None:
    broken, sound = await store.batch(1), await store.batch(1)
    for batch_id in (broken, sound):
        token = await open_all(store, batch_id, 1)
        await store.finish(token, [0], batch_id, answer="x" * 300_000)
    query = sa.select(segments.c.blob).where(segments.c.batch_id == broken)
    (row,) = await store.sql(query)
    content = await store.context.blobs.read(row.blob, 0, MIB)
    await store.context.blobs.delete("test.step", row.blob)
    with pytest.raises(BlobMissingError):
        await store.context.blobs.read(row.blob, 0, 1)
    await store.turn()
    assert (await store.get(broken)).status == FINALIZING
    assert (await store.get(sound)).status == COMPLETED

    # Who waits for it is told why, and ever less often it is tried in vain: after 5 s, 10 s, …
    reason = (await store.get(broken)).nightshift.reason
    assert row.blob in reason
    assert "nightshift doctor --check" in reason
    assert (await store.get(sound)).nightshift.reason == ""
    for pause in (5, 10, 20, 40, 80, 160, 300, 300):
        before = await retry_ms(store, broken)
        assert before - store.context.now_ms() == pause * 1000
        store.clock.advance(pause - 1)
        await store.turn()
        assert await retry_ms(store, broken) == before
        store.clock.advance(1)
        await store.turn()

    await store.context.blobs.put("test.step", row.blob, content[:-1])
    store.clock.advance(300)
    await store.turn()
    # A blob cut short is as good as none: no result is made up.
    assert (await store.get(broken)).status == FINALIZING
    await store.context.blobs.delete("test.step", row.blob)
    await store.context.blobs.put("test.step", row.blob, content)
    store.clock.advance(300)
    await store.turn()
    batch = await store.get(broken)
    assert batch.status == COMPLETED
    assert batch.nightshift.reason == ""
    output, error = await store.end_files(broken)
    assert (len(output), error) == (1, [])


async def test_a_batch_that_ended_its_store_before_has_the_finalizer_to_itself(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins when nothing is at work, and nothing begins beside it."""
    sound, suspect, late = [await store.batch(1) for _ in range(3)]
    tokens = {each: await open_all(store, each, 1) for each in (sound, suspect, late)}
    for each in (sound, suspect):
        await store.finish(tokens[each], [0], each)
    tried = {"tries": SUSPECT_TRIES, "retry_ms": store.context.now_ms()}
    await store.context.db.write(
        "test.step",
        lambda connection: connection.execute(
            batches.update().where(batches.c.id == suspect).values(tried)
        ),
    )
    claim, finish = store.finalizer._claim, store.finalizer._finish
    looks = 0
    at_work: list[str] = []
    beside: list[tuple[str, list[str]]] = []

    async def counted(most: int) -> list[tuple[Any, str]]:
        nonlocal looks
        found = await claim(most)
        looks += 1
        return found

    async def held(batch: Any, parts: Announced) -> None:
        beside.append((batch.id, list(at_work)))
        at_work.append(batch.id)
        if batch.id == suspect:
            await store.finish(tokens[late], [0], late)
        # Others are looked for meanwhile.
        enough = looks + 2
        await eventually(lambda: looks >= enough)
        await finish(batch, parts)
        at_work.remove(batch.id)

    monkeypatch.setattr(store.finalizer, "_claim", counted)
    monkeypatch.setattr(store.finalizer, "_finish", held)
    await asyncio.wait_for(store.finalizer.run_once(), 60)
    assert beside == [(sound, []), (suspect, []), (late, [])]
    for each in (sound, suspect, late):
        assert (await store.get(each)).status == COMPLETED


async def retry_ms(store: Store, batch_id: str) -> int:
    (row,) = await store.sql(sa.select(batches.c.retry_ms).where(batches.c.id == batch_id))
    return int(row.retry_ms)


async def test_events_tell_each_step_once(store: Store) -> None:
    batch_id = await store.batch(2)
    token = await open_all(store, batch_id, 2)
    await store.finish(token, [0, 1], batch_id)
    await store.finish(token, [0, 1], batch_id)
    await store.turn()
    rows = await store.sql(sa.select(outbox.c.subject).order_by(outbox.c.id))
    subjects = [row.subject for row in rows if row.subject.endswith(batch_id)]
    assert subjects == [
        f"nightshift.event.{kind}.{batch_id}"
        for kind in ("batch_ready", "batch_sealed", "batch_ended")
    ]


async def test_long_inputs_that_never_ran_are_named(store: Store) -> None:
    texts = [chat_line(f"r{n}", "x" * (3 * MIB if n == 1 else 10)) for n in range(4)]
    batch_id = await store.batch(texts)
    await store.cancel(batch_id)
    await store.turn()
    output, error = await store.end_files(batch_id)
    assert output == []
    assert [line["custom_id"] for line in error] == ["r0", "r1", "r2", "r3"]
