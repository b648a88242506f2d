"""`up` dies, or stands still, at each step of the files that it keeps in its directory."""

import contextlib
import signal
from pathlib import Path

import psutil
import pytest

from services.cli.shared.datadir import OWNER_VARIABLE, DataDir, DataDirError, DataDirInUseError
from services.kit.messages.bus_roles import ROLES
from tests.integration.crash_windows.stories import BOTH, armed, freezes, kills
from tests.kit.eventually import eventually
from tests.kit.template import Copied, Template, template
from tests.kit.up import RunningUp

__all__ = ["template"]

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]

WITHIN_SECONDS = 40.0


def user(template: Template, folder: Path, step: str, action: str) -> Copied:
    """A process that takes the directory and dies, or stops, at the places of a step."""
    reached = folder / "reached"
    reached.mkdir()
    return Copied(
        template,
        "tests.integration.crash_windows.directory_user",
        {
            "NIGHTSHIFT_TEST_DIRECTORY": str(folder / "data"),
            "NIGHTSHIFT_FAILPOINTS": armed(step, action),
            "NIGHTSHIFT_FAILPOINTS_DIR": str(reached),
        },
        folder / "log",
    )


def check_whole(data: DataDir) -> None:
    """Everything is there, and whole; nobody is said to run."""
    assert len(bytes.fromhex(data.read_secret())) == 32
    assert data.read_address("store") == "127.0.0.1:1"
    config = data.nats_config.read_text()
    assert config.endswith("}\n")
    for role in ROLES:
        assert f'"{data.nats_password(role).read_text().strip()}"' in config
    assert list(data.run.iterdir()) == []


@kills("up.secret", "up.nats_config", "up.addresses", "up.pid", "up.forget_pid")
async def test_killed(step: str, template: Template, tmp_path: Path) -> None:
    data = DataDir(tmp_path / "data")
    process = user(template, tmp_path, step, "kill")
    secrets = set()
    for at in (*BOTH, None):
        process.start()
        await eventually(lambda: not process.runs, within_seconds=WITHIN_SECONDS)
        assert at is None or (tmp_path / "reached" / f"{step}:{at}").exists(), process.log()
        with contextlib.suppress(DataDirError):
            secrets.add(data.read_secret())
    check_whole(data)
    assert secrets == {data.read_secret()}


@freezes("up.secret", "up.nats_config", "up.addresses", "up.pid", "up.forget_pid")
async def test_frozen(step: str, template: Template, tmp_path: Path) -> None:
    data = DataDir(tmp_path / "data")
    process = user(template, tmp_path, step, "freeze")
    process.start()
    try:
        for at in BOTH:
            place = tmp_path / "reached" / f"{step}:{at}"
            await eventually(
                lambda place=place: place.exists() and process.frozen,  # type: ignore[misc]  # bound now
                within_seconds=WITHIN_SECONDS,
            )
            # Another `up` is told who has it, and changes nothing.
            with pytest.raises(DataDirInUseError, match=str(process.pid)), data.locked():
                pass
            assert set(data.pids()) <= {process.pid}
            process.send(signal.SIGCONT)
        await eventually(lambda: not process.runs, within_seconds=WITHIN_SECONDS)
    finally:
        await process.kill()
    check_whole(data)


@pytest.mark.parametrize("passing", [1, 3])
async def test_a_child_whose_number_was_never_written_is_ended_all_the_same(
    tmp_path: Path, passing: int
) -> None:
    data = tmp_path / "data"
    armed = {"NIGHTSHIFT_FAILPOINTS": f"up.pid:before@{passing}=kill"}
    killed = RunningUp(data, environment=armed)
    try:
        await eventually(lambda: killed.process.poll() is not None, within_seconds=WITHIN_SECONDS)
        assert killed.process.returncode == -signal.SIGKILL
        await eventually(lambda: not children_of(data), within_seconds=WITHIN_SECONDS)
    finally:
        killed.stop()


def children_of(data: Path) -> list[str]:
    """Names of the processes that an `up` on a directory started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(OWNER_VARIABLE) == str(data):
                found.append(process.name())
        except psutil.Error:
            continue
    return found
