"""Files that a command writes, and what is no file."""

import os
import stat
from pathlib import Path

import pytest

from services.cli.shared.follow_results import Writer
from services.cli.shared.outputs import Output

pytestmark = pytest.mark.unit

LINE = '{"custom_id":"a","response":{"status_code":200},"error":null}'


def test_a_file_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    output = Output(tmp_path / "out")
    output.place.write_bytes(b"half")
    assert not output.path.exists()
    output.place.write_bytes(b"whole")
    output.keep()
    output.discard()
    assert output.path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [output.path]


def test_nothing_is_left_of_half_a_file(tmp_path: Path) -> None:
    output = Output(tmp_path / "out")
    output.path.write_bytes(b"old")
    output.place.write_bytes(b"half")
    output.discard()
    assert output.path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [output.path]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with Writer(tmp_path / "link", None) as writer:
        writer.line(LINE)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "out").read_text() == f"{LINE}\n"


def test_what_is_no_file_is_written_to_and_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with Writer(pipe, tmp_path / "errors") as writer:
            writer.line(LINE)
            assert os.read(reading, 1000).decode() == f"{LINE}\n"
            writer.start_over()
            assert "all lines follow again" in capsys.readouterr().err
            writer.line(LINE)
        assert os.read(reading, 1000).decode() == f"{LINE}\n"
    finally:
        os.close(reading)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "errors", pipe]
