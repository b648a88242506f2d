"""Models for tests with a real engine, each made once a session."""

from pathlib import Path

import pytest

from tests.kit.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random-weight model."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))
