"""What an executor is told through the environment."""

import asyncio
from typing import NoReturn

import pytest

from services.executor.engines.base import EngineStartError
from services.executor.engines.simulated.engine import SimulatedEngine
from services.executor.engines.vllm import api
from services.executor.main import make_engine
from services.executor.settings import ExecutorSettings
from services.kit.process.settings import SettingsError
from services.kit.wire.ids import pool_id_of

pytestmark = pytest.mark.unit


def test_the_defaults_run_a_simulated_engine() -> None:
    settings = ExecutorSettings.load()
    assert isinstance(make_engine(settings, "0"), SimulatedEngine)
    assert settings.model_paths == {"simulated": ""}
    assert settings.pool_id == pool_id_of("simulated")


def test_models_are_names_with_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTSHIFT_EXECUTOR_ENGINE", "vllm")
    monkeypatch.setenv("NIGHTSHIFT_EXECUTOR_MODELS", "a=/models/a, b=org/b")
    monkeypatch.setenv("NIGHTSHIFT_EXECUTOR_ENGINE_ARGS", "--dtype float32 --x 'a b'")
    monkeypatch.setenv("NIGHTSHIFT_NATS_URL", "nats://elsewhere:4222")
    settings = ExecutorSettings.load()
    assert settings.model_paths == {"a": "/models/a", "b": "org/b"}
    assert settings.engine_arguments == ["--dtype", "float32", "--x", "a b"]
    assert settings.pool_id == pool_id_of("a")
    assert settings.nats_url == "nats://elsewhere:4222"
    monkeypatch.setenv("NIGHTSHIFT_EXECUTOR_POOL", "shared")
    assert ExecutorSettings.load().pool_id == pool_id_of("shared")


def test_an_engine_answers_to_all_names_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store takes lines for each of them."""
    monkeypatch.setenv("NIGHTSHIFT_EXECUTOR_ENGINE", "vllm")
    monkeypatch.setenv("NIGHTSHIFT_EXECUTOR_MODELS", "a=/m,b=/m,adapter=/lora")
    parsed: list[tuple[object, ...]] = []

    def parse_arguments(*arguments: object) -> NoReturn:
        parsed.append(arguments)
        raise EngineStartError("enough")

    monkeypatch.setattr(api, "parse_arguments", parse_arguments)
    engine = make_engine(ExecutorSettings.load(), "0")
    with pytest.raises(EngineStartError, match="enough"):
        asyncio.run(engine.start())
    assert parsed == [("/m", ("a", "b"), [])]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MODELS", " , "),
        ("MODELS", "a,=b"),
        ("ENGINE", "other"),
        ("NAME", "a b"),
        ("ENGINE_ARGS", "'unclosed"),
        ("LINE_TIMEOUT_SECONDS", "0"),
        ("UNHEARD_OF", "1"),
    ],
)
def test_what_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"NIGHTSHIFT_EXECUTOR_{name}", value)
    with pytest.raises(SettingsError):
        ExecutorSettings.load()


def test_an_engine_with_files_needs_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTSHIFT_EXECUTOR_ENGINE", "vllm")
    monkeypatch.setenv("NIGHTSHIFT_EXECUTOR_MODELS", "a")
    with pytest.raises(SettingsError, match="NAME=PATH"):
        ExecutorSettings.load()


def test_the_simulated_engine_takes_no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTSHIFT_EXECUTOR_ENGINE_ARGS", "--seats 3")
    with pytest.raises(SettingsError, match="no arguments"):
        make_engine(ExecutorSettings.load(), "0")


def test_its_name_is_its_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpu7.example.org")
    assert ExecutorSettings.load().name == "gpu7-example-org"
