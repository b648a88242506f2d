"""A backup, or a restore, dies or stands still at each of its steps while a store works on."""

import asyncio
import json
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.integration.crash_windows.stories import BOTH, armed, freezes, kills
from tests.integration.store_work.harness import running
from tests.kit import backups
from tests.kit.data_at_rest import Data, check, make
from tests.kit.eventually import eventually
from tests.kit.store import chat_line
from tests.kit.template import Copied, Template, template

__all__ = ["template"]

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]

WITHIN_SECONDS = 60.0


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Make a data directory once: a batch half done, one that ended, an upload begun."""
    return asyncio.run(make(tmp_path_factory.mktemp("pristine") / "data"))


@pytest.fixture(scope="module")
def whole(pristine: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Take a backup of it once."""
    to = tmp_path_factory.mktemp("whole") / "backup"
    asyncio.run(backups.take_here(pristine.root, to))
    return to


class Command:
    """`backup` or `restore`, as often as it is run."""

    def __init__(self, template: Template, folder: Path, data: Path, *arguments: str) -> None:
        self._reached = folder / "reached"
        self._reached.mkdir(parents=True)
        self.process = Copied(
            template,
            "tests.integration.crash_windows.backup_user",
            {
                "NIGHTSHIFT_STORE_DATA_DIR": str(data),
                "NIGHTSHIFT_TEST_ARGUMENTS": json.dumps(arguments),
                "NIGHTSHIFT_FAILPOINTS_DIR": str(self._reached),
            },
            folder / "log",
        )

    async def run(self) -> None:
        """Run it to its end."""
        self.process.start()
        await eventually(lambda: not self.process.runs, within_seconds=WITHIN_SECONDS)

    def at(self, place: str) -> bool:
        """Whether it has come to a place, and is no more or stands still."""
        stood = not self.process.runs or self.process.frozen
        return stood and (self._reached / place).exists()

    async def dies(self, step: str, made: Path) -> None:
        """Run it as often as it takes, while it dies at both places of a step."""
        self.process.environment["NIGHTSHIFT_FAILPOINTS"] = armed(step, "kill")
        for at in BOTH:
            self._forget(made)
            await self.run()
            assert self.at(f"{step}:{at}"), self.process.log()
        if not self._is_done(made):
            await self.run()

    def _is_done(self, made: Path) -> bool:
        return made.exists()

    def _forget(self, made: Path) -> None:
        """Remove a backup that is whole: what died after that is done anew to die once more."""
        if made.name == "backup.json" and self._is_done(made):
            shutil.rmtree(made.parent)

    async def stops(self, step: str, meanwhile: Callable[[], Awaitable[None]]) -> None:
        """Run it while it stands still at both places of a step, and something else goes on."""
        self.process.environment["NIGHTSHIFT_FAILPOINTS"] = armed(step, "freeze")
        self.process.start()
        try:
            for at in BOTH:
                place = f"{step}:{at}"
                await eventually(lambda place=place: self.at(place), within_seconds=WITHIN_SECONDS)  # type: ignore[misc]  # bound now
                await meanwhile()
                self.process.send(signal.SIGCONT)
            await eventually(lambda: not self.process.runs, within_seconds=WITHIN_SECONDS)
        finally:
            await self.process.kill()


@kills("backup.hold", "backup.rows", "backup.blob", "backup.finish", "backup.release")
async def test_killed(step: str, template: Template, pristine: Data, tmp_path: Path) -> None:
    data, to = pristine.copy(tmp_path / "data").root, tmp_path / "backup"
    command = Command(template, tmp_path, data, "take", "--to", str(to))
    await command.dies(step, to / "backup.json")
    assert check(to, deep=True).faults == []
    assert check(data, deep=True).faults == []


@freezes("backup.hold", "backup.rows", "backup.blob", "backup.finish", "backup.release")
async def test_frozen(step: str, template: Template, pristine: Data, tmp_path: Path) -> None:
    data, to = pristine.copy(tmp_path / "data").root, tmp_path / "backup"
    command = Command(template, tmp_path, data, "take", "--to", str(to))
    async with running(data) as store:
        file = await store.upload(chat_line("before"))

        async def goes_on() -> None:
            # What is stopped inside a transaction of SQLite holds up whoever writes.
            await store.download(file.id)
            if step not in {"backup.hold", "backup.release"}:
                await store.upload(chat_line("later"))
                await store.sweeper.run_once()

        await command.stops(step, goes_on)
        await store.upload(chat_line("later still"))
        await store.sweeper.run_once()
    assert check(to, deep=True).faults == [], command.process.log()
    assert check(data, deep=True).faults == []


@kills("restore.begin", "restore.blob", "restore.finish")
async def test_restore_killed(step: str, template: Template, whole: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = Command(template, tmp_path, data, "restore", "--from", str(whole))
    await command.dies(step, data / "nightshift.db")
    assert check(data, deep=True).faults == [], command.process.log()


@freezes("restore.begin", "restore.blob", "restore.finish")
async def test_restore_frozen(step: str, template: Template, whole: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = Command(template, tmp_path, data, "restore", "--from", str(whole))
    other = Command(template, tmp_path / "other", data, "restore", "--from", str(whole))

    async def is_refused() -> None:
        # Nobody else restores there meanwhile.
        await other.run()
        assert '"cannot"' in other.process.log()

    await command.stops(step, is_refused)
    assert check(data, deep=True).faults == [], command.process.log()
