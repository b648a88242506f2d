"""Whatever happens to a batch, in whatever order, the check finds nothing wrong on the way."""

import asyncio
from pathlib import Path

import pytest

from tests.integration.store_work.harness import running
from tests.integration.store_work.test_model import History
from tests.kit.data_at_rest import check

pytestmark = [pytest.mark.integration, pytest.mark.slow]

EVERY = 6


class Checked(History):
    """A history that is looked at all the time."""

    steps = 0

    async def check(self) -> None:
        await super().check()
        self.steps += 1
        if self.steps % EVERY:
            return
        found = await asyncio.to_thread(check, self.store.context.settings.data_dir, deep=True)
        assert found.faults == []


@pytest.mark.parametrize("seed", [2, 5, 11, 14])
async def test_no_history_looks_damaged(tmp_path: Path, seed: int) -> None:
    async with running(tmp_path / "data", max_attempts=1_000) as store:
        (tmp_path / "data" / "secret").chmod(0o600)
        history = Checked(store, seed)
        await history.run()
    assert history.steps > EVERY
    assert check(tmp_path / "data", deep=True).faults == []
