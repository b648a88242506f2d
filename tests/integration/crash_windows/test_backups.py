"""A backup, or a restore, dies or stands still at each of its steps while a store works on."""

import asyncio
import contextlib
import json
import signal
from pathlib import Path

import pytest

from services.kit.errors import UnavailableError
from tests.integration.crash_windows.stories import freezes, kills
from tests.integration.store_work.harness import running
from tests.kit import backups
from tests.kit.data_at_rest import Data, check, make
from tests.kit.eventually import eventually
from tests.kit.store import chat_line
from tests.kit.template import Copied, Template, template

__all__ = ["template"]

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(120)]

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
        reached = folder / "reached"
        reached.mkdir(exist_ok=True)
        self.process = Copied(
            template,
            "tests.integration.crash_windows.backup_user",
            {
                "NIGHTSHIFT_STORE_DATA_DIR": str(data),
                "NIGHTSHIFT_TEST_ARGUMENTS": json.dumps(arguments),
                "NIGHTSHIFT_FAILPOINTS_DIR": str(reached),
            },
            folder / "log",
        )

    async def run(self, armed: str = "") -> None:
        """Run it to its end."""
        self.process.start({"NIGHTSHIFT_FAILPOINTS": armed})
        await self.ended()

    async def ended(self) -> None:
        """Wait for its end."""
        await eventually(lambda: not self.process.runs, within_seconds=WITHIN_SECONDS)

    async def frozen(self, place: str) -> None:
        """Run it until it stands still."""
        self.process.start({"NIGHTSHIFT_FAILPOINTS": f"{place}=freeze"})
        try:
            await eventually(lambda: self.process.frozen, within_seconds=WITHIN_SECONDS)
        except AssertionError as error:
            error.add_note(self.process.log())
            raise


@kills("backup.hold", "backup.rows", "backup.blob", "backup.finish", "backup.release")
async def test_killed(place: str, template: Template, pristine: Data, tmp_path: Path) -> None:
    data = pristine.copy(tmp_path / "data").root
    to = tmp_path / "backup"
    command = Command(template, tmp_path, data, "take", "--to", str(to))
    await command.run(f"{place}=kill")
    assert (tmp_path / "reached" / place).exists(), command.process.log()
    if not (to / "backup.json").exists():
        await command.run()
    assert check(to, deep=True).faults == []
    assert check(data, deep=True).faults == []


@freezes("backup.hold", "backup.rows", "backup.blob", "backup.finish", "backup.release")
async def test_frozen(place: str, template: Template, pristine: Data, tmp_path: Path) -> None:
    data = pristine.copy(tmp_path / "data").root
    to = tmp_path / "backup"
    command = Command(template, tmp_path, data, "take", "--to", str(to))
    async with running(data) as store:
        try:
            await command.frozen(place)
            # A lock of SQLite that nobody ends holds up what is new, and takes nothing back.
            with contextlib.suppress(UnavailableError):
                await store.upload(chat_line("later"))
                await store.sweeper.run_once()
        finally:
            command.process.send(signal.SIGCONT)
            await command.ended()
        await store.upload(chat_line("later still"))
        await store.sweeper.run_once()
    assert check(to, deep=True).faults == [], command.process.log()
    assert check(data, deep=True).faults == []


@kills("restore.begin", "restore.blob", "restore.finish")
async def test_restore_killed(place: str, template: Template, whole: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = Command(template, tmp_path, data, "restore", "--from", str(whole))
    await command.run(f"{place}=kill")
    assert (tmp_path / "reached" / place).exists(), command.process.log()
    if not (data / "nightshift.db").exists():
        await command.run()
    assert check(data, deep=True).faults == [], command.process.log()


@freezes("restore.begin", "restore.blob", "restore.finish")
async def test_restore_frozen(place: str, template: Template, whole: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = Command(template, tmp_path, data, "restore", "--from", str(whole))
    try:
        await command.frozen(place)
        # Nobody else restores there meanwhile, and no store begins on half of it.
        other = Command(template, tmp_path, data, "restore", "--from", str(whole))
        await other.run()
        assert '"cannot"' in other.process.log()
    finally:
        command.process.send(signal.SIGCONT)
        await command.ended()
    assert check(data, deep=True).faults == [], command.process.log()
