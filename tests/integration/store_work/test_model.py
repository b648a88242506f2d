"""Random histories of cuts, deliveries, results, losses, cancels and deadlines against a model.

Whatever happens, in whatever order: counts are those of the first results, they only grow,
statuses move along the drawing, and each line ends in exactly one of the two files.
"""

import random
from pathlib import Path

import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import batches_pb2, dispatch_pb2
from services.kit.wire.errors import ConflictError
from services.store.domain.state import TERMINAL, BatchStatus, can_move
from services.store.tables.core import chunks
from tests.integration.store_work.harness import Store, running
from tests.integration.store_work.worker import frame, ranges_of

pytestmark = [pytest.mark.integration, pytest.mark.slow]

WINDOW_SECONDS = 120
STEPS = 120


class History:
    """One batch under random treatment, and what must be true of it."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.chance = random.Random(seed)
        self.total = self.chance.choice([1, 2, 7, 40, 40, 4_200])
        self.batch_id = ""
        self.deadline = 0.0
        self.cancelled = False
        self.status = BatchStatus.VALIDATING
        # Line → (failed, answer) of its first result.
        self.first: dict[int, tuple[bool, str]] = {}
        self.messages: list[dispatch_pb2.Dispatch] = []
        self.tokens: dict[str, list[tuple[int, int]]] = {}
        self.frames = 0

    async def run(self) -> None:
        self.batch_id = await self.store.batch(self.total, window_seconds=WINDOW_SECONDS)
        self.deadline = self.store.clock.now() + WINDOW_SECONDS
        steps = [
            (self.cut, 4),
            (self.deliver, 8),
            (self.append, 10),
            (self.beat, 3),
            (self.hand_back, 2),
            (self.die, 1),
            (self.reclaim, 5),
            (self.wait, 4),
            (self.turn, 3),
            (self.cancel, 0.15),
        ]
        names, weights = zip(*steps, strict=True)
        for step in self.chance.choices(names, weights, k=STEPS):
            await step()
            await self.check()
        await self.come_to_an_end()

    async def cut(self) -> None:
        most = self.chance.choice([1, 3, 20, 1_000])
        self.messages += await self.store.cut((self.batch_id, most))

    async def deliver(self) -> None:
        if not self.messages:
            return
        answer = await self.store.deliver(
            self.chance.choice(self.messages),
            self.chance.choice(["e0", "e1"]),
            delivered=self.chance.choice([1, 1, 2]),
        )
        if answer.WhichOneof("outcome") == "opened":
            lines = ranges_of(answer.opened.lines)
            self.tokens[answer.opened.token] = lines
            done = {line for first, count in lines for line in range(first, first + count)}
            assert not done & self.first.keys()

    async def append(self) -> None:
        if not self.tokens:
            return
        token, ranges = self.chance.choice(list(self.tokens.items()))
        lines = [line for first, count in ranges for line in range(first, first + count)]
        lines = self.chance.choices(lines, k=self.chance.choice([1, 2, len(lines), 600]))
        failed = set(self.chance.sample(lines, self.chance.randint(0, 1)))
        self.frames += 1
        answer = f"{self.frames}"
        (ack,) = await self.store.append(
            frame(token, self.batch_id, lines, failed=failed, answer=answer)
        )
        if ack.sealed:
            assert ack.accepted == 0
            late = self.store.clock.now() >= self.deadline
            assert self.cancelled or late or len(self.first) == self.total
            return
        new = set(lines) - self.first.keys()
        assert ack.accepted == len(new)
        self.first.update((line, (line in failed, answer)) for line in new)

    async def beat(self) -> None:
        some = self.chance.sample(sorted(self.tokens), min(len(self.tokens), 3))
        await self.store.beat({token: self.tokens[token][:1] for token in some})

    async def hand_back(self) -> None:
        if self.tokens:
            token = self.chance.choice(sorted(self.tokens))
            await self.store.hand_back(token, executor=self.chance.choice(["e0", "e1"]))

    async def die(self) -> None:
        if self.tokens:
            token = self.chance.choice(sorted(self.tokens))
            executor = self.chance.choice(["e0", "e1"])
            await self.store.died({token: self.tokens[token][-1:]}, executor)

    async def reclaim(self) -> None:
        found = await self.store.reclaim()
        assert sum(each.alone for each in found) <= 1
        self.messages += found

    async def wait(self) -> None:
        self.store.clock.advance(self.chance.choice([0.1, 1, 2, 5]))

    async def turn(self) -> None:
        loops = [self.store.ender.run_once, self.store.finalizer.run_once]
        await self.chance.choice(loops)()

    async def cancel(self) -> None:
        try:
            await self.store.cancel(self.batch_id)
        except ConflictError:
            assert self.status in TERMINAL - {BatchStatus.CANCELLED}
        else:
            self.cancelled = True

    async def check(self) -> None:
        batch = await self.store.get(self.batch_id)
        failed = sum(bad for bad, _ in self.first.values())
        assert batch.request_counts == batches_pb2.RequestCounts(
            total=self.total, completed=len(self.first) - failed, failed=failed
        )
        assert batch.usage.input_tokens == 3 * len(self.first)
        name = batches_pb2.BatchStatus.Name(batch.status).removeprefix("BATCH_STATUS_").lower()
        status = BatchStatus(name)
        assert status in (self.status, *_ahead(self.status))
        self.status = status
        over = status in TERMINAL
        assert over or not (batch.HasField("output_file_id") or batch.HasField("error_file_id"))

    async def come_to_an_end(self) -> None:
        self.store.clock.advance(WINDOW_SECONDS)
        await self.store.turn()
        self.store.clock.advance(2)
        await self.store.turn()
        await self.check()
        assert self.status == (
            BatchStatus.CANCELLED
            if self.cancelled
            else BatchStatus.COMPLETED
            if len(self.first) == self.total
            else BatchStatus.EXPIRED
        )
        output, error = await self.store.end_files(self.batch_id)
        good = {line: answer for line, (bad, answer) in self.first.items() if not bad}
        assert [(line["custom_id"], line["response"]["body"]["answer"]) for line in output] == [
            (f"r{line}", good[line]) for line in sorted(good)
        ]
        assert [line["custom_id"] for line in error] == [
            f"r{line}" for line in range(self.total) if line not in good
        ]
        ran = [line for line in error if line["response"]]
        assert len(ran) == len(self.first) - len(good)
        assert await self.store.sql(sa.select(chunks.c.id)) == []


def _ahead(source: BatchStatus) -> set[BatchStatus]:
    """Statuses one move or two ahead: both may lie between two looks."""
    near = {status for status in BatchStatus if can_move(source, status)}
    return near | {status for status in BatchStatus for each in near if can_move(each, status)}


@pytest.mark.parametrize("seed", range(16))
async def test_any_history_ends_with_every_line_once(tmp_path: Path, seed: int) -> None:
    # Giving lines up has tests of its own; here it would only hide what else went wrong.
    async with running(tmp_path, max_attempts=1_000) as store:
        await History(store, seed).run()
