"""A store dies, or stands still, at each step of a batch that is not about its results."""

from pathlib import Path

import pytest

from protos.nightshift.v1 import batches_pb2
from services.kit.wire.errors import ConflictError
from tests.integration.crash_windows import hands
from tests.integration.crash_windows.backings import migrated_database, postgres, shared
from tests.integration.crash_windows.stories import Stories
from tests.integration.crash_windows.world import Asker, Backing, Check, World
from tests.kit.store import chat_line, our_errors
from tests.kit.template import Template, template

__all__ = ["migrated_database", "postgres", "shared", "template"]

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]

stories = Stories()
LINES = b"".join(chat_line(f"r{number}") for number in range(4))
CANCELLED = batches_pb2.BATCH_STATUS_CANCELLED
CANCELLING = batches_pb2.BATCH_STATUS_CANCELLING
EXPIRED = batches_pb2.BATCH_STATUS_EXPIRED
FAILED = batches_pb2.BATCH_STATUS_FAILED
IN_PROGRESS = batches_pb2.BATCH_STATUS_IN_PROGRESS
VALIDATING = batches_pb2.BATCH_STATUS_VALIDATING


async def batches_of(asker: Asker) -> list[str]:
    with our_errors():
        answer = await asker.batches.ListBatches(
            batches_pb2.ListBatchesRequest(), metadata=asker.metadata
        )
    return [batch.id for batch in answer.batches]


@stories.windows("batch.create", "batch.start")
async def creation(world: World) -> Check:
    """However often it has to be asked for, one key makes one batch, and that runs."""
    await world.start()
    file = await world.created(lambda asker: asker.upload(LINES))
    await world.arm()
    batch = await world.do(lambda asker: asker.create(file.id), key="k")
    await world.until(lambda: hands.status_is(world, batch.id, IN_PROGRESS))

    async def check() -> None:
        assert (await world.do(lambda asker: asker.create(file.id), key="k")).id == batch.id
        assert await world.do(batches_of) == [batch.id]
        assert await hands.status_is(world, batch.id, IN_PROGRESS)
        assert await hands.left(world, batch.id) == 4

    return check


@stories.windows("batch.fail")
async def faulty_input(world: World) -> Check:
    """What cannot run fails, once, with its reasons."""
    await world.start()
    file = await world.created(lambda asker: asker.upload(LINES + LINES))
    await world.arm()
    batch = await world.created(lambda asker: asker.create(file.id))
    await world.until(lambda: hands.status_is(world, batch.id, FAILED))

    async def check() -> None:
        failed = await world.do(lambda asker: asker.get(batch.id))
        assert failed.status == FAILED
        assert {error.code for error in failed.errors} == {"duplicate_custom_id"}

    return check


async def left_validating(world: World, step: str) -> str:
    """A batch whose store died at a step of its validation; nothing runs now."""
    await world.start()
    file = await world.created(lambda asker: asker.upload(LINES))
    await world.member.process.kill()
    await world.start(armed=f"{step}=kill")
    batch = await world.do(lambda asker: asker.create(file.id), key="k")
    await world.until(lambda: not world.member.process.runs)
    return batch.id


@stories.windows("validate.claim")
async def validation_after_a_death(world: World) -> Check:
    """A batch that was being judged when its store died is judged by the next one."""
    batch_id = await left_validating(world, "batch.start:before")
    await world.arm()
    await world.until(lambda: hands.status_is(world, batch_id, IN_PROGRESS))

    async def check() -> None:
        assert await hands.left(world, batch_id) == 4

    return check


@stories.windows("validate.give_up")
async def validation_given_up(world: World) -> Check:
    """An input of which stores died again and again is not tried for ever."""
    batch_id = await left_validating(world, "batch.start:before")
    await world.arm(lambda: world.sql("UPDATE batches SET tries = 6"))
    await world.until(lambda: hands.status_is(world, batch_id, FAILED))

    async def check() -> None:
        failed = await world.do(lambda asker: asker.get(batch_id))
        assert [error.code for error in failed.errors] == ["server_error"]

    return check


@stories.windows("validate.put_off")
async def validation_put_off(world: World) -> Check:
    """An input that cannot be read just now is judged once it can be."""
    batch_id = await left_validating(world, "batch.start:before")
    # The index alone would be made again.
    stored = {each: each.read_bytes() for each in world.blobs()}

    def damage() -> None:
        for each in stored:
            each.unlink()
            # It is there, and the disk does not give it.
            each.mkdir()

    await world.arm(damage)
    await world.until(lambda: world.reached)
    for each, whole in stored.items():
        each.rmdir()
        each.write_bytes(whole)
    await world.until(lambda: hands.status_is(world, batch_id, IN_PROGRESS))

    async def check() -> None:
        assert await hands.left(world, batch_id) == 4

    return check


@stories.windows("batch.cancel", "batch.seal")
async def cancel(world: World) -> Check:
    """A cancel that was acknowledged is never undone."""
    await world.start()
    batch_id = await hands.new_batch(world)
    opened = await hands.open_chunk(world, batch_id)
    await world.arm()
    cancelled = await world.do(lambda asker: asker.cancel(batch_id))
    assert cancelled.status in {CANCELLING, CANCELLED}
    await world.until(lambda: hands.status_is(world, batch_id, CANCELLED))

    async def check() -> None:
        sent = hands.frame(opened.token, batch_id, [0])
        late = await world.do(lambda asker: asker.append(sent))
        assert late[0].sealed
        batch = await world.do(lambda asker: asker.get(batch_id))
        assert batch.status == CANCELLED
        assert batch.request_counts.completed + batch.request_counts.failed == 0
        content = await world.do(lambda asker: asker.download(batch.error_file_id))
        assert content.count(b'"batch_cancelled"') == content.count(b"\n") == 6

    return check


@stories.windows("batch.stop_late")
async def expiry(world: World) -> Check:
    """A batch past its time ends with what it has."""
    await world.start()
    batch_id = await hands.new_batch(world, window_seconds=3_600)
    opened = await hands.open_chunk(world, batch_id)
    await world.do(lambda asker: asker.append(hands.frame(opened.token, batch_id, [0])))
    await world.arm(lambda: world.sql("UPDATE batches SET expires_ms = created_at * 1000 + 1"))
    await world.until(lambda: hands.status_is(world, batch_id, EXPIRED))

    async def check() -> None:
        batch = await world.do(lambda asker: asker.get(batch_id))
        assert (batch.status, batch.request_counts.completed) == (EXPIRED, 1)
        content = await world.do(lambda asker: asker.download(batch.error_file_id))
        assert content.count(b'"batch_expired"') == content.count(b"\n") == 5
        with pytest.raises(ConflictError):
            await world.do(lambda asker: asker.cancel(batch_id))

    return check


@stories.windows(
    "finalize.claim", "finalize.write", "finalize.announce", "finalize.end", "batch.clear"
)
async def finalizing(world: World) -> Check:
    """One output and one error file, whoever wrote them, and nothing of any other try."""
    await world.start()
    batch_id = await hands.new_batch(world)
    opened = await hands.open_chunk(world, batch_id)
    await world.arm()
    await hands.answer(world, batch_id, opened, long=(1,))
    await world.until(lambda: hands.status_is(world, batch_id, hands.COMPLETED))
    # Clearing up comes behind the end.
    await world.until(lambda: world.reached)

    async def check() -> None:
        await hands.check_completed(world, batch_id, long=(1,))

    return check


@stories.windows("finalize.retry")
async def finalizing_put_off(world: World) -> Check:
    """End files that cannot be written just now are written once they can be."""
    await world.start()
    batch_id = await hands.new_batch(world)
    opened = await hands.open_chunk(world, batch_id)
    for number in range(5):
        text = hands.LONG if number == 1 else f"answer {number}"
        sent = hands.frame(
            opened.token, batch_id, [number], failed=hands.failed(number), answer=text
        )
        await world.do(lambda asker, sent=sent: asker.append(sent))  # type: ignore[misc]  # bound now
    (segment,) = (one for one in world.blobs() if one.parent.name == "segment")
    away = segment.with_name("away")
    await world.arm(lambda: segment.rename(away))  # type: ignore[arg-type,return-value]  # nobody asks
    last = hands.frame(opened.token, batch_id, [5], answer="answer 5")
    await world.do(lambda asker: asker.append(last))
    await world.until(lambda: world.reached)
    away.rename(segment)
    await world.until(lambda: hands.status_is(world, batch_id, hands.COMPLETED))

    async def check() -> None:
        await hands.check_completed(world, batch_id, long=(1,))

    return check


@stories.windows("stream.keep")
async def stream(world: World) -> Check:
    """Events of a batch are told in order, by whichever store is asked."""
    await world.start()
    batch_id = await hands.new_batch(world)
    opened = await hands.open_chunk(world, batch_id)
    await world.do(lambda asker: asker.append(hands.frame(opened.token, batch_id, [0, 1])))
    await world.arm()
    reader = hands.Reader(world, batch_id)
    await reader.read(2)
    await world.do(lambda asker: asker.append(hands.frame(opened.token, batch_id, [2, 3])))
    await reader.read(4)
    await world.do(lambda asker: asker.append(hands.frame(opened.token, batch_id, [4, 5])))
    await reader.read(6)

    async def check() -> None:
        assert reader.lines == [hands.result(batch_id, number) for number in range(6)]
        other = hands.Reader(world, batch_id)
        await other.read(6)
        assert sorted(other.lines) == sorted(reader.lines)

    return check


@pytest.mark.parametrize("name", stories.names())
async def test_killed(name: str, template: Template, tmp_path: Path) -> None:
    await stories.killed(name, template, tmp_path)


@pytest.mark.parametrize("name", stories.names())
async def test_frozen(name: str, template: Template, tmp_path: Path, shared: Backing) -> None:
    await stories.frozen(name, template, tmp_path, shared)
