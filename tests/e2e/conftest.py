"""Models for tests with a real engine, each made once a session."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random-weight model."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def small_model() -> Path:
    """The folder of SmolLM2-135M-Instruct; converted where it is not there yet (15 to 30 s).

    In a process of its own, since what it imports warns.
    """
    command = [sys.executable, "-m", "services.executor.small_model"]
    made = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return Path(made.stdout.splitlines()[-1])
