"""The reaper kills what it was told of when its standard input ends, and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

from services.executor.engines.vllm import reaper

pytestmark = pytest.mark.unit


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def test_kills_what_it_was_told_of_once_its_input_ends() -> None:
    told, other, ended = sleeper(), sleeper(), sleeper()
    ended.kill()
    ended.wait()
    try:
        command = [sys.executable, str(Path(reaper.__file__))]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            assert process.stdin is not None
            process.stdin.write(b"%d\n%d\n" % (ended.pid, told.pid))
            process.stdin.flush()
            with pytest.raises(subprocess.TimeoutExpired):
                told.wait(0.3)
            process.stdin.close()
            assert process.wait(20) == 0
        assert told.wait(20) == -9
        assert other.poll() is None
    finally:
        for child in (told, other):
            child.kill()
            child.wait()
