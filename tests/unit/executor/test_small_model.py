"""The small model's command, but for the conversion itself (tests/e2e)."""

import subprocess
import sys
from pathlib import Path

import pytest

from services.executor import small_model

pytestmark = pytest.mark.unit


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.executor.small_model", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_model_that_is_there_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = run("--out", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}\n")


def test_without_the_package_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_model, "DISTRIBUTION", "no-such-distribution")
    with pytest.raises(small_model.ModelMissing, match="make setup"):
        small_model.prepare(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(small_model, "find_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(small_model, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        small_model.prepare(tmp_path / "models" / "model")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_conversion_is_all_there_once_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        assert not (tmp_path / "model").exists()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(small_model, "find_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(small_model, "_convert", convert)
    assert small_model.prepare(tmp_path / "model") == tmp_path / "model"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
