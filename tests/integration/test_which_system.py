"""Commands that name a directory act on its system, whatever the environment is set to."""

import json
from pathlib import Path

import pytest

from services.cli.shared import which_system
from services.cli.shared.datadir import DataDir, DataDirError
from tests.integration.test_keys_commands import create, listed, nightshift
from tests.kit.postgres import Postgres
from tests.kit.up import SIMULATED, running_up

pytestmark = pytest.mark.integration

DATABASE = "NIGHTSHIFT_STORE_DATABASE_URL"
BLOBS = "NIGHTSHIFT_STORE_BLOBS_URL"
ELSEWHERE = {DATABASE: "postgresql://me:hidden@db.example/other?sslmode=require"}


@pytest.fixture
def directory(tmp_path: Path) -> DataDir:
    """Return a directory that is not there yet."""
    return DataDir(tmp_path / "data")


@pytest.fixture
def embedded(directory: DataDir) -> DataDir:
    """Make one that holds a system."""
    (directory.root / "blobs").mkdir(parents=True)
    (directory.root / "nightshift.db").touch()
    return directory


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("postgresql://u:p@h:5/d?sslmode=require", "postgresql://h:5/d"),
        ("postgresql+psycopg://u:p@/d?host=a:1&host=b:2&password=p", "?host=a:1&host=b:2"),
        ("s3://bucket/prefix", "s3://bucket/prefix"),
        ("postgresql://u:p@[::1]:5,b:6/d?user=u@b", "postgresql://[::1]:5,b:6/d"),
        ("file:///a/b@c", "file:///a/b@c"),
        ("postgresql://u:p@[h", "cannot be read"),
        ("host=h user=u password=p@", "cannot be read"),
        ("postgresql:u:p@h/d", "cannot be read"),
        ("postgresql://u:secret/p@h/d", "cannot be read"),
        ("postgresql://u:s@secret/p@h/d", "cannot be read"),
        ("postgresql://u:secret?p@h/d", "cannot be read"),
        ("postgresql://u:secret#p@h/d", "cannot be read"),
    ],
)
def test_places_are_named_without_passwords(url: str, name: str) -> None:
    named = which_system.name_of(url)
    assert name in named
    assert "p@" not in named
    assert "password" not in named
    assert "secret" not in named


def test_a_directory_that_holds_a_system_is_that(
    embedded: DataDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert which_system.to_start(embedded, {}) == {"database": "", "blobs": ""}
    with pytest.raises(DataDirError, match="is in it: unset the variable"):
        which_system.to_start(embedded, ELSEWHERE)
    with pytest.raises(DataDirError, match="place for blobs of"):
        which_system.to_start(embedded, {BLOBS: "s3://bucket/prefix"})
    # Another spelling of itself.
    itself = {DATABASE: f"sqlite:///{embedded.root / 'nightshift.db'}"}
    assert which_system.to_start(embedded, itself)["database"] == ""
    assert capsys.readouterr().err == ""
    assert which_system.to_ask(embedded, ELSEWHERE, may_be_new=True) == {DATABASE: "", BLOBS: ""}
    said = capsys.readouterr().err
    assert f"{DATABASE} is set and not used: the database of {embedded.root} is in it" in said


def test_a_directory_of_a_system_elsewhere_wants_its_address(directory: DataDir) -> None:
    places = which_system.to_start(directory, ELSEWHERE)
    assert places == {"database": "postgresql://db.example/other", "blobs": ""}
    directory.root.mkdir()
    directory.write_addresses(places)
    # As long as it is the same one.
    same = {DATABASE: "postgresql://you@db.example/other"}
    assert which_system.to_ask(directory, same, may_be_new=False)[DATABASE] == same[DATABASE]
    for ask in (which_system.to_start, lambda *asked: which_system.to_ask(*asked, may_be_new=True)):
        with pytest.raises(DataDirError, match="DATABASE_URL is not set: set it"):
            ask(directory, {})
    another = {DATABASE: "postgresql://db.example/third"}
    with pytest.raises(DataDirError, match=r"is postgresql://db\.example/other: set it to that"):
        which_system.to_ask(directory, another, may_be_new=True)
    # An `up` may follow a database that moved.
    assert which_system.to_start(directory, another)["database"] == another[DATABASE]


def test_a_new_directory_is_what_the_environment_says_only_for_whoever_makes_one(
    directory: DataDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        which_system.to_ask(directory, ELSEWHERE, may_be_new=True)[DATABASE] == ELSEWHERE[DATABASE]
    )
    said = capsys.readouterr().err
    assert f"the database is postgresql://db.example/other, as {DATABASE} says" in said
    assert "hidden" not in said
    assert which_system.to_ask(directory, ELSEWHERE, may_be_new=False)[DATABASE] == ""


def test_one_that_runs_is_asked_where_it_was_named(
    embedded: DataDir, capsys: pytest.CaptureFixture[str]
) -> None:
    which_system.check_running(embedded, {}, is_named=False)
    with pytest.raises(DataDirError, match="name the one that you mean"):
        which_system.check_running(embedded, ELSEWHERE, is_named=False)
    assert capsys.readouterr().err == ""
    which_system.check_running(embedded, ELSEWHERE, is_named=True)
    assert "is set and not used" in capsys.readouterr().err


def test_a_new_directory_is_told_once_where_its_system_is(directory: DataDir) -> None:
    directory.root.mkdir()
    assert which_system.to_note(directory, {DATABASE: "", BLOBS: ""}) == {}
    assert which_system.to_note(directory, ELSEWHERE) == {
        "database": "postgresql://db.example/other"
    }
    directory.write_addresses(which_system.to_note(directory, ELSEWHERE))
    assert which_system.to_note(directory, {DATABASE: "postgresql://db.example/third"}) == {}


def test_a_directory_with_a_system_of_its_own_is_told_nothing(embedded: DataDir) -> None:
    assert which_system.to_note(embedded, ELSEWHERE) == {}


@pytest.mark.parametrize("noted", [b"{", b"[]", b"\xff"])
def test_a_damaged_word_of_it_is_refused_with_what_to_do(directory: DataDir, noted: bytes) -> None:
    directory.root.mkdir()
    (directory.root / "addresses.json").write_bytes(noted)
    with pytest.raises(DataDirError, match=r"addresses\.json is damaged.*put it back"):
        which_system.to_start(directory, {})
    with pytest.raises(DataDirError, match="is damaged"):
        directory.read_address("store")


@pytest.mark.slow
def test_whoever_names_no_directory_means_that_of_the_store_s_settings(tmp_path: Path) -> None:
    data = {which_system.DATA_DIR: str(tmp_path / "data")}
    made = nightshift("keys", "create", "--project", "p", **data)
    assert f"the directory is {tmp_path / 'data'}, as {which_system.DATA_DIR} says" in made.stderr
    assert (tmp_path / "data" / "nightshift.db").exists()
    taken = nightshift("backup", "--to", str(tmp_path / "backup"), **data)
    assert taken.returncode == 0, taken.stderr
    # One that is named is meant all the same.
    other = str(tmp_path / "other")
    assert "nothing at" in nightshift("keys", "list", "--data", other, **data).stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory with a key in it."""
    data = tmp_path_factory.mktemp("made") / "data"
    create(data, "inside")
    return data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["keys", "list", "--json"], 0),
        (["doctor", "--check"], 0),
        (["backup", "--json"], 0),
        (["up", *SIMULATED, "--listen", "127.0.0.1:0"], 1),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_each_command_says_what_it_does_not_use(
    made: Path, tmp_path: Path, command: list[str], status: int
) -> None:
    to = ["--to", str(tmp_path / "backup")] if command[0] == "backup" else []
    done = nightshift(*command, *to, "--data", str(made), **ELSEWHERE)
    assert done.returncode == status, done.stderr
    assert DATABASE in done.stderr
    assert str(made) in done.stderr
    if "keys" in command:
        assert json.loads(done.stdout)["project_id"] == "inside"


@pytest.mark.slow
def test_commands_follow_an_up_to_its_database(tmp_path: Path, postgres: Postgres) -> None:
    data = tmp_path / "data"
    there = {DATABASE: postgres.new_database()}
    made = nightshift("keys", "create", "--project", "p", "--data", str(data), **there)
    assert "the database is postgresql://127.0.0.1" in made.stderr
    # Nobody makes another system there before an `up` ran.
    assert "is not set: set it" in nightshift("keys", "list", "--data", str(data)).stderr
    with running_up(data, environment=there):
        # Whatever the environment says.
        assert [key["project_id"] for key in listed(data)] == ["p"]
    assert not (data / "nightshift.db").exists()
    for command in (["keys", "list"], ["doctor", "--check"], ["up", *SIMULATED]):
        refused = nightshift(*command, "--data", str(data))
        assert refused.returncode in (1, 2), refused
        assert f"{DATABASE} is not set: set it" in refused.stderr
