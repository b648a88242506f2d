"""Where a command finds its server, and with which key it asks."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from services.cli.main import main
from services.cli.shared.openai_client import open_client

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1/"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1/"),
        ("https://[::1]/nightshift/v1", "https://[::1]/nightshift/v1/"),
    ],
)
def test_an_address_is_asked_below_v1_unless_it_says_where(given: str, asked: str) -> None:
    with open_client(given, "none") as client:
        assert str(client.base_url) == asked


@pytest.mark.parametrize(
    "given", ["", "127.0.0.1:8000", "localhost:8000", "http://", "http://[::1", "http://a:99999"]
)
def test_what_is_no_address_is_said_in_one_line(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        open_client(given, "none")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("nightshift: --base-url takes an address such as http://")
    assert said.count("\n") == 1


@pytest.mark.parametrize("key", ["ключ", "a\nb", ""])
def test_what_is_no_key_is_said_without_it(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        open_client("http://127.0.0.1:8000", key)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "API key" in said
    assert not key or key not in said


def test_requests_that_can_be_read_once_only_are_refused(tmp_path: Path) -> None:
    """Their first lines would be gone before they are sent."""
    os.mkfifo(tmp_path / "pipe")
    done = CliRunner().invoke(main, ["submit", str(tmp_path / "pipe")])
    assert done.exit_code == 2
    assert "is no file" in done.output


def test_one_file_for_results_and_errors_is_refused() -> None:
    """One would be written over the other."""
    command = "results batch_1 --output lines.jsonl --errors ./lines.jsonl"
    for how in ([], ["--follow"]):
        done = CliRunner().invoke(main, [*command.split(), *how])
        assert done.exit_code == 2
        assert "name the same file" in done.output


def test_a_limit_that_no_gateway_can_count_is_refused() -> None:
    command = "keys create --project p --requests-per-minute 2147483648"
    done = CliRunner().invoke(main, command.split())
    assert done.exit_code == 2
    assert "is not in the range" in done.output


@pytest.mark.parametrize(
    "command", ["watch", "cancel", "results", "webhooks delete", "webhooks test", "keys revoke"]
)
def test_an_empty_id_is_refused_before_it_is_asked_for(command: str) -> None:
    done = CliRunner().invoke(main, [*command.split(), ""])
    assert done.exit_code == 2
    assert "Invalid value for 'ID': it is empty" in done.output
