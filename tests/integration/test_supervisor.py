"""A supervised child, with real processes: kept running, ended whole, left by nobody."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from services.cli.shared.datadir import OWNER_VARIABLE, DataDir, DataDirError
from services.cli.up.child import Child, ChildSpec
from services.cli.up.leftovers import end_leftovers
from tests.kit.eventually import eventually
from tests.kit.power_cut import PowerCut
from tests.kit.up import is_running

SLEEPER = "import time; time.sleep(600)"
# Ignores SIGTERM, and has a child of its own as an engine has.
STUBBORN_PARENT = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid) + "\\n")
time.sleep(600)
"""

MakeChild = Callable[..., Child]


@pytest.fixture
def data(tmp_path: Path) -> DataDir:
    directory = DataDir(tmp_path / "data")
    directory.run.mkdir(parents=True)
    return directory


@pytest.fixture
async def make_child(data: DataDir) -> AsyncIterator[MakeChild]:
    made: list[Child] = []

    def make(code: str, *arguments: str, stop_seconds: float = 10.0) -> Child:
        spec = ChildSpec(
            name=f"child-{len(made)}",
            command=(sys.executable, "-c", code, *arguments),
            environment={**os.environ, OWNER_VARIABLE: str(data.root)},
            stop_seconds=stop_seconds,
        )
        made.append(Child(spec, data))
        return made[-1]

    yield make
    hurry = asyncio.Event()
    hurry.set()
    for child in made:
        await child.stop(hurry)


def pid_of(data: DataDir, name: str = "child-0") -> int:
    file = data.run / f"{name}.pid"
    return int(file.read_text()) if file.exists() else 0


async def test_a_killed_child_is_started_again_within_half_a_second(
    data: DataDir, make_child: MakeChild
) -> None:
    child = make_child(SLEEPER)
    await child.start()
    first = pid_of(data)
    os.kill(first, signal.SIGKILL)
    second = await eventually(
        lambda: (pid := pid_of(data)) != first and pid, within_seconds=0.5, every_seconds=0.005
    )
    assert is_running(second)
    assert child.exit_code == -signal.SIGKILL


async def test_a_child_that_ends_by_itself_is_started_again_too(
    data: DataDir, make_child: MakeChild, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    child = make_child("import sys; open(sys.argv[1], 'a').write('x')", str(marks))
    await child.start()
    await eventually(lambda: marks.exists() and len(marks.read_text()) >= 3)
    assert child.exit_code == 0


async def test_a_child_whose_pid_file_cannot_be_made_or_removed_is_started_again(
    data: DataDir, make_child: MakeChild, tmp_path: Path
) -> None:
    (data.run / "child-0.pid").mkdir()
    marks = tmp_path / "marks"
    child = make_child("import sys; open(sys.argv[1], 'a').write('x')", str(marks))
    await child.start()
    await eventually(lambda: marks.exists() and len(marks.read_text()) >= 3)


async def test_stop_ends_it_and_takes_its_pid_file_away(
    data: DataDir, make_child: MakeChild
) -> None:
    child = make_child(SLEEPER)
    await child.start()
    pid = pid_of(data)
    await child.stop(asyncio.Event())
    assert not is_running(pid)
    assert list(data.run.iterdir()) == []


async def test_what_does_not_stop_is_killed_with_its_own_children(
    data: DataDir, make_child: MakeChild, tmp_path: Path
) -> None:
    pids = tmp_path / "grandchild"
    child = make_child(STUBBORN_PARENT, str(pids), stop_seconds=0.2)
    await child.start()
    await eventually(lambda: pids.exists() and pids.read_text().endswith("\n"))
    grandchild = int(pids.read_text())
    assert is_running(grandchild)
    await child.stop(asyncio.Event())
    await eventually(lambda: not is_running(grandchild))


async def test_a_second_signal_does_not_wait(
    data: DataDir, make_child: MakeChild, tmp_path: Path
) -> None:
    pids = tmp_path / "grandchild"
    child = make_child(STUBBORN_PARENT, str(pids), stop_seconds=600)
    await child.start()
    await eventually(lambda: pids.exists() and pids.read_text().endswith("\n"))
    hurry = asyncio.Event()
    stop = asyncio.create_task(child.stop(hurry))
    await asyncio.sleep(0)
    assert not stop.done()
    hurry.set()
    async with asyncio.timeout(5):
        await stop


async def test_the_children_of_a_dead_child_go_before_it_starts_again(
    data: DataDir, make_child: MakeChild, tmp_path: Path
) -> None:
    pids = tmp_path / "grandchild"
    child = make_child(STUBBORN_PARENT, str(pids), stop_seconds=0.1)
    await child.start()
    await eventually(lambda: pids.exists() and pids.read_text().endswith("\n"))
    grandchild = int(pids.read_text())
    os.kill(pid_of(data), signal.SIGKILL)
    await eventually(lambda: not is_running(grandchild))


async def test_a_program_that_is_missing_is_tried_again_and_can_be_stopped(data: DataDir) -> None:
    spec = ChildSpec(name="missing", command=("/nowhere/at/all",), environment={})
    child = Child(spec, data)
    await child.start()
    async with asyncio.timeout(5):
        await child.stop(asyncio.Event())
    assert list(data.run.iterdir()) == []


def test_leftovers_are_ended_and_strangers_are_not(data: DataDir) -> None:
    sleeper = [sys.executable, "-c", SLEEPER]
    ours = subprocess.Popen(
        sleeper, env={**os.environ, OWNER_VARIABLE: str(data.root)}, process_group=0
    )
    stranger = subprocess.Popen(sleeper, process_group=0)
    try:
        data.write_pid("store", ours.pid)
        # As after a restart of the machine: the number is somebody else's now.
        data.write_pid("gateway", stranger.pid)
        data.write_pid("scheduler", 2**22 - 1)
        assert end_leftovers(data) == ["store"]
        assert not is_running(ours.pid)
        assert stranger.poll() is None
        assert list(data.run.iterdir()) == []
    finally:
        for process in (ours, stranger):
            process.kill()
            process.wait()


def test_a_directory_in_use_is_refused_by_name(data: DataDir) -> None:
    refusal = pytest.raises(DataDirError, match=rf"in use.*{os.getpid()}.*--data")
    with data.locked(), refusal, DataDir(data.root).locked():
        pass
    with data.locked():
        pass


def test_the_secret_is_for_its_owner_only_and_stays(data: DataDir) -> None:
    path = data.ensure_secret()
    assert path.stat().st_mode & 0o777 == 0o600
    secret = data.read_secret()
    assert len(bytes.fromhex(secret)) == 32
    data.ensure_secret()
    assert data.read_secret() == secret


def test_a_pid_file_that_goes_while_they_are_read_is_none(data: DataDir) -> None:
    data.write_pid("store", 17)
    # Listed, and gone when it is opened.
    (data.run / "gateway.pid").symlink_to(data.run / "gone")
    assert data.pids() == {17: "store"}


def test_a_directory_that_cannot_be_written_is_told_by_name(data: DataDir) -> None:
    (data.root / ".secret.new").mkdir()
    with pytest.raises(DataDirError, match=r"secret cannot be used: Is a directory"):
        data.ensure_secret()


@pytest.mark.slow
def test_what_it_keeps_is_whole_after_a_power_cut(tmp_path: Path) -> None:
    disk = PowerCut(tmp_path)
    kept = """
import os, sys
from pathlib import Path
from services.cli.shared.datadir import DataDir
data = DataDir(Path(sys.argv[1]))
with data.locked():
    # The store's part, as is the directory's own name.
    os.fsync(os.open(data.root.parent, os.O_RDONLY))
    data.ensure_secret()
    data.write_addresses({"database": "postgresql://db/nightshift"})
    print(data.read_secret())
"""
    data = DataDir(disk.root / "data")
    done = subprocess.run(
        [sys.executable, "-c", kept, str(data.root)],
        env={**os.environ, **disk.environment()},
        capture_output=True,
        text=True,
        check=True,
    )
    disk.cut()
    assert data.read_secret() == done.stdout.strip()
    assert data.noted("database") == "postgresql://db/nightshift"
