"""First durable result wins, however often, late and in whatever size results come."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import batches_pb2, work_pb2
from services.kit.wire.errors import InvalidRequestError, TooLargeError
from services.kit.wire.frames import FRAME_BYTES, RESULT_RECORD
from services.store.tables.core import blobs, segments
from services.store.work import result_stream
from tests.integration.store_work.harness import Store, running
from tests.integration.store_work.worker import frame, result

pytestmark = pytest.mark.integration

MIB = 1024 * 1024


async def open_one(store: Store, lines: int) -> tuple[str, str]:
    """Return a batch and the token of an attempt on all its lines."""
    batch_id = await store.batch(lines)
    (dispatch,) = await store.cut((batch_id, lines))
    return batch_id, (await store.open(dispatch)).token


async def test_the_first_result_of_a_line_wins(store: Store) -> None:
    batch_id, token = await open_one(store, 4)
    acks = await store.append(
        frame(token, batch_id, [2, 0], answer="first"),
        frame(token, batch_id, [0, 1, 1, 2], failed=[0, 2], answer="second", number=2),
        frame(token, batch_id, [2], answer="third", number=3),
    )
    assert [(ack.frame, ack.accepted) for ack in acks] == [(1, 2), (2, 1), (3, 0)]
    batch = await store.get(batch_id)
    assert batch.request_counts == batches_pb2.RequestCounts(total=4, completed=3)
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (9, 18)
    assert await store.finish(token, [3], batch_id) == 1
    await store.turn()
    output, error = await store.end_files(batch_id)
    assert [line["response"]["body"]["answer"] for line in output] == [
        "first",
        "second",
        "first",
        "ok",
    ]
    assert error == []


async def test_a_sealed_batch_takes_nothing(store: Store) -> None:
    batch_id, token = await open_one(store, 2)
    await store.cancel(batch_id)
    store.clock.advance(2)
    await store.ender.run_once()
    big = frame(token, batch_id, [0], answer="x" * MIB)
    (small_ack,) = await store.append(frame(token, batch_id, [1]))
    (big_ack,) = await store.append(*split(big, FRAME_BYTES))
    assert (small_ack.sealed, small_ack.accepted) == (True, 0)
    assert (big_ack.sealed, big_ack.accepted) == (True, 0)
    await store.turn()
    assert (await store.get(batch_id)).request_counts == batches_pb2.RequestCounts(total=2)
    # Its rows are gone by now, and still the answer is the same.
    (ack,) = await store.append(frame(token, batch_id, [1]))
    assert ack.sealed
    (ack,) = await store.append(frame("attempt_unknown", batch_id, [1]))
    assert ack.sealed
    await store.sweeper.run_once()
    assert await store.sql(sa.select(blobs.c.name).where(blobs.c.name.contains("segment"))) == []


def split(whole: work_pb2.AppendResultsRequest, size: int) -> list[work_pb2.AppendResultsRequest]:
    """Return a frame in pieces of `size` payload bytes."""
    return [
        work_pb2.AppendResultsRequest(
            token=whole.token,
            frame=whole.frame,
            records=b"" if start else whole.records,
            payload=whole.payload[start : start + size],
            more=start + size < len(whole.payload),
        )
        for start in range(0, len(whole.payload), size)
    ]


async def test_long_results_travel_in_pieces_and_large_ones_become_blobs(store: Store) -> None:
    batch_id, token = await open_one(store, 5)
    long = frame(token, batch_id, [1], answer="long" * MIB, number=1)
    wide = frame(token, batch_id, [4, 0], answer="w" * 200_000, number=2)
    small = frame(token, batch_id, [3], number=3)
    acks = await store.append(*split(long, FRAME_BYTES), wide, small)
    assert [(ack.frame, ack.accepted) for ack in acks] == [(1, 1), (2, 2), (3, 1)]
    rows = await store.sql(
        sa.select(segments.c.blob.is_(None), segments.c.first_line).order_by(segments.c.first_line)
    )
    assert [tuple(row) for row in rows] == [(False, 0), (False, 1), (True, 3)]

    await store.finish(token, [2], batch_id)
    await store.turn()
    batch = await store.get(batch_id)
    answers = ["w" * 200_000, "long" * MIB, "ok", "ok", "w" * 200_000]
    expected = b"".join(
        result(batch_id, line, answer=answer) for line, answer in enumerate(answers)
    )
    assert await store.download(batch.output_file_id) == expected
    assert not batch.HasField("error_file_id")


async def test_a_late_result_of_an_older_dispatch_counts(store: Store) -> None:
    batch_id, token = await open_one(store, 3)
    await store.beat({token: [(0, 2)]})
    store.clock.advance(15)
    alone, rest = await store.reclaim()
    new = await store.open(rest, "e1")
    # Lines of other chunks by now, and of its own one.
    assert await store.finish(token, [0, 2], batch_id) == 2
    assert await store.finish(new.token, [2], batch_id) == 0
    opened = await store.open(alone, "e1")
    assert await store.finish(opened.token, [1, 0], batch_id) == 1
    await store.turn()
    assert (await store.get(batch_id)).status == batches_pb2.BATCH_STATUS_COMPLETED


async def test_a_frame_that_does_not_fit_is_refused_whole(store: Store) -> None:
    batch_id, token = await open_one(store, 3)
    good = frame(token, batch_id, [0, 1])
    rows = np.frombuffer(good.records, RESULT_RECORD)

    def spoilt(column: str, value: int) -> work_pb2.AppendResultsRequest:
        changed = rows.copy()
        changed[column][1] = value
        return work_pb2.AppendResultsRequest(
            token=token, frame=1, records=changed.tobytes(), payload=good.payload
        )

    bad = [
        spoilt("line", 3),
        spoilt("length", 0),
        spoilt("length", 2**32 - 1),
        spoilt("offset", len(good.payload)),
        spoilt("length", int(rows["length"][1]) - 1),
        work_pb2.AppendResultsRequest(token=token, frame=1, records=good.records[:-1]),
        work_pb2.AppendResultsRequest(token=token, frame=1, payload=good.payload),
    ]
    for each in bad:
        with pytest.raises(InvalidRequestError):
            await store.append(each)
    assert (await store.get(batch_id)).request_counts.completed == 0
    # What came before a bad frame is recorded all the same.
    with pytest.raises(InvalidRequestError):
        await store.append(good, bad[0])
    assert (await store.get(batch_id)).request_counts.completed == 2


async def test_a_frame_that_is_cut_off_is_refused(store: Store) -> None:
    batch_id, token = await open_one(store, 3)
    first, second = split(frame(token, batch_id, [0]), 100)[:2]
    for stream in ([first], [first, frame(token, batch_id, [1], number=2)], [first, first]):
        with pytest.raises(InvalidRequestError):
            await store.append(*stream)
    assert second.more or second.payload
    assert (await store.get(batch_id)).request_counts.completed == 0


async def test_a_frame_without_end_is_refused(tmp_path: Path) -> None:
    around = len(result("batch_x", 0, answer=""))
    # What an input line may have is another thing.
    async with running(tmp_path, max_result_bytes=4 * MIB, max_line_bytes=MIB) as store:
        batch_id, token = await open_one(store, 2)
        longer = frame(token, batch_id, [0], answer="x" * (4 * MIB - around + 1))
        # Known by its first message.
        with pytest.raises(TooLargeError, match=f"at most {4 * MIB} bytes"):
            await store.append(split(longer, FRAME_BYTES)[0])
        longest = split(frame(token, batch_id, [0], answer="x" * (4 * MIB - around)), FRAME_BYTES)
        several = split(frame(token, batch_id, [0, 1], answer="x" * MIB), FRAME_BYTES)
        cut = [*longest[:-1], work_pb2.AppendResultsRequest(token=token, frame=1, payload=b"x")]
        with_more = [*longest[:-1], *longest[-2:]]
        for wrong in (several, cut, with_more):
            with pytest.raises(InvalidRequestError):
                await store.append(*wrong)
        (ack,) = await store.append(*longest)
        assert ack.accepted == 1
        await store.sweeper.run_once()
        names = await store.sql(sa.select(blobs.c.name).where(blobs.c.name.contains("segment")))
        assert len(names) == 1


async def test_many_frames_are_acknowledged_in_order(store: Store) -> None:
    batch_id, token = await open_one(store, 300)
    frames = [
        frame(token, batch_id, [line], number=line + 1, answer="b" * (300_000 * (line % 50 == 0)))
        for line in range(300)
    ]
    acks = await store.append(*frames)
    assert [ack.frame for ack in acks] == list(range(1, 301))
    assert all(ack.accepted == 1 for ack in acks)
    assert (await store.get(batch_id)).status == batches_pb2.BATCH_STATUS_FINALIZING


async def test_room_of_frames_whose_stream_breaks_off_is_given_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one that was read at that very moment, on which no work has begun."""
    batch_id, token = await open_one(store, 4)
    one, two = [frame(token, batch_id, [line], number=line + 1) for line in (0, 1)]
    both = frame(token, batch_id, [2, 3])
    monkeypatch.setattr(result_stream, "BYTES_IN_FLIGHT", len(both.payload))
    appender = result_stream.Appender(store.context)

    async def breaks_off() -> AsyncIterator[work_pb2.AppendResultsRequest]:
        yield one
        asking.cancel()
        yield two
        await asyncio.Event().wait()

    answers = appender.answers(breaks_off())
    asking = asyncio.create_task(anext(answers))
    with pytest.raises(asyncio.CancelledError):
        await asking

    async def whole() -> AsyncIterator[work_pb2.AppendResultsRequest]:
        yield both

    async with asyncio.timeout(30):
        (ack,) = [each async for each in appender.answers(whole())]
    assert ack.accepted == 2
