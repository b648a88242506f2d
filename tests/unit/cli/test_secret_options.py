"""Secrets on a command line: read from a file, or taken with a warning."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from services.cli.shared.openai_client import server_options
from services.cli.shared.store_job import place_options
from services.kit.wire.api_keys import new_key

pytestmark = pytest.mark.unit

KEY = new_key(bytes(32))
URL = "postgresql://user:secret-word@db/nightshift"


@click.command()
@server_options
@place_options
def shows(**options: object) -> None:
    """Show what arrived."""
    click.echo(f"{options['api_key']} {options['database_url']}")


def run(*arguments: str, **environment: str) -> Result:
    """Run it."""
    return CliRunner().invoke(shows, arguments, env=environment)


def test_a_secret_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    (tmp_path / "url").write_text(f"{URL}\n")
    done = run("--api-key", f"@{tmp_path}/key", "--database-url", f"@{tmp_path}/url")
    assert (done.stdout, done.stderr) == (f"{KEY} {URL}\n", "")
    gone = run("--api-key", f"@{tmp_path}/none")
    assert (gone.exit_code, f"cannot read {tmp_path}/none" in gone.stderr) == (2, True)


@pytest.mark.parametrize(
    ("option", "value", "variable"),
    [
        ("--api-key", KEY, "NIGHTSHIFT_API_KEY"),
        ("--database-url", URL, "NIGHTSHIFT_STORE_DATABASE_URL"),
        ("--database-url", "postgresql:///n?password=secret", "NIGHTSHIFT_STORE_DATABASE_URL"),
    ],
)
def test_one_on_the_command_line_is_taken_with_a_warning(
    option: str, value: str, variable: str
) -> None:
    done = run(option, value)
    assert value in done.stdout
    assert f"warning: {option} shows its secret" in done.stderr
    assert variable in done.stderr
    assert value not in done.stderr


def test_nothing_is_said_of_what_is_no_secret() -> None:
    assert run("--api-key", "none", "--database-url", "postgresql://db/n").stderr == ""
    done = run(NIGHTSHIFT_API_KEY=KEY)
    assert (done.stdout, done.stderr) == (f"{KEY} None\n", "")
