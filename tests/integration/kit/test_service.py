"""A service's process drains when told, ends with its parent, and says what is wrong."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from services.kit.process import service
from services.kit.process.settings import SettingsError

pytestmark = pytest.mark.integration

END_SECONDS = 10.0

# Says when it runs and when it has drained; a service itself writes nothing to standard output.
PLANT = """
import asyncio
from services.kit.process import service

async def serve(stopping):
    await asyncio.sleep(0)  # what watches the parent has begun
    print("runs", flush=True)
    await stopping.wait()
    print("drained", flush=True)

service.run("plant", serve)
"""


@pytest.fixture
def plant() -> Iterator["subprocess.Popen[str]"]:
    """Run a service that does nothing; it runs when the test begins."""
    with subprocess.Popen([sys.executable, "-c", PLANT], stdout=subprocess.PIPE, text=True) as one:
        assert next_line(one.stdout) == "runs"
        yield one
        if one.poll() is None:
            one.kill()


def next_line(stream: IO[str] | None) -> str:
    """Return the next line of a process's output, without its end."""
    assert stream is not None
    return stream.readline().rstrip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_drains_when_it_is_told_to_stop(
    plant: "subprocess.Popen[str]", number: signal.Signals
) -> None:
    plant.send_signal(number)
    assert next_line(plant.stdout) == "drained"
    assert plant.wait(END_SECONDS) == 0


def test_it_ends_with_its_parent_where_it_is_asked_to() -> None:
    reading, writing = os.pipe()
    # The parent waits until its child runs, and is killed as `up` may be.
    code = f"""
import os, signal, subprocess, sys
os.environ["NIGHTSHIFT_DIE_WITH_PARENT"] = str(os.getpid())
subprocess.Popen([sys.executable, "-c", {PLANT!r}], stdout={writing})
open({reading}, "rb", buffering=0, closefd=False).readline()
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        pass_fds=(reading, writing),
    )
    os.close(writing)
    assert done.returncode == -signal.SIGKILL
    with os.fdopen(reading) as rest:
        # Ends when the last process that can write to it has ended.
        assert rest.read() == "drained\n"


def test_a_fault_that_nobody_foresaw_is_an_event_of_the_log_and_status_1() -> None:
    code = """
from services.kit.process import service

async def serve(stopping):
    raise RuntimeError("no soil")

service.run("plant", serve)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    [line] = [json.loads(line) for line in done.stderr.splitlines()]
    assert (line["event"], line["service"]) == ("service_failed", "plant")
    assert "RuntimeError: no soil" in line["exception"]


def test_settings_that_do_not_fit_are_one_line_and_status_2() -> None:
    code = """
from services.kit.process import service
from services.kit.process.settings import SettingsError

async def serve(stopping):
    raise SettingsError("pots must be more")

service.run("plant", serve)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "nightshift plant: pots must be more\n"


def test_a_secret_is_read_without_its_line_end(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123abcd\n")
    assert service.read_secret(file) == "0123abcd"


def test_a_secret_that_is_missing_or_empty_is_named_by_its_setting(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(SettingsError, match=f"{file}: No such.*NIGHTSHIFT_SECRET_FILE"):
        service.read_secret(file)
    file.write_text("\n")
    with pytest.raises(SettingsError, match="empty"):
        service.read_secret(file)
    file.write_bytes(bytes(range(256)))
    with pytest.raises(SettingsError, match="NIGHTSHIFT_SECRET_FILE"):
        service.read_secret(file)
