"""What kills processes in tests does nothing elsewhere."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit


def test_places_to_die_in_are_refused_outside_of_tests() -> None:
    program = (
        "from services.kit.process import failpoints\nfailpoints.before('a.step')\nprint('alive')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={"NIGHTSHIFT_FAILPOINTS": "a.step:before=kill"},
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "NIGHTSHIFT_FAILPOINTS kills processes and is for tests only" in done.stderr
