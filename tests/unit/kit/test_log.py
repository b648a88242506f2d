"""Logs are JSON lines on standard error, with no secret in them; a real process each."""

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.unit


def lines_of(code: str, level: str = "INFO") -> list[dict[str, Any]]:
    """Run code after `configure` in a process of its own; returns what it logged, decoded."""
    head = "import logging\nfrom services.kit.process import log\n"
    head += f"log.configure('plant', {level!r})\n"
    done = subprocess.run([sys.executable, "-c", head + code], capture_output=True, check=True)
    assert done.stdout == b""
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_a_line_has_its_event_level_time_service_and_fields() -> None:
    (line,) = lines_of(
        "log.get_logger('services.plant').info('watered', batch_id='batch_1', lines=3)"
    )
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "watered",
        "level": "info",
        "logger": "services.plant",
        "service": "plant",
        "batch_id": "batch_1",
        "lines": 3,
    }


def test_bound_ids_are_in_every_line_of_a_library_too() -> None:
    lines = lines_of(
        "import structlog\n"
        "structlog.contextvars.bind_contextvars(chunk_id='chunk_1')\n"
        "log.get_logger('ours').warning('late')\n"
        "logging.getLogger('library').warning('it is %s', 'late')\n"
    )
    assert [(line["event"], line["chunk_id"], line["service"]) for line in lines] == [
        ("late", "chunk_1", "plant"),
        ("it is late", "chunk_1", "plant"),
    ]


def test_a_line_of_any_thread_has_the_service() -> None:
    lines = lines_of(
        "import threading\n"
        "for target in (log.get_logger('ours').info, logging.getLogger('library').info):\n"
        "    thread = threading.Thread(target=target, args=('watered',))\n"
        "    thread.start()\n"
        "    thread.join()\n"
    )
    assert [(line["event"], line["service"]) for line in lines] == [("watered", "plant")] * 2


def test_no_key_and_no_body_is_logged() -> None:
    lines = lines_of(
        "names = ['authorization', 'api_key', 'secret', 'body', 'content', 'data']\n"
        "log.get_logger('ours').error('refused', **{name: 'hunter2' for name in names}, line=4)\n"
        "log.get_logger('ours').bind(api_key='hunter2').error('refused')\n"
    )
    assert "hunter2" not in json.dumps(lines)
    assert lines[0]["line"] == 4
    assert lines[0]["body"] == lines[1]["api_key"] == "[not logged]"


def test_a_failure_is_one_line_with_its_traceback() -> None:
    (line,) = lines_of(
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n"
        "    log.get_logger('ours').exception('turn_failed')\n"
    )
    assert line["event"] == "turn_failed"
    assert "ZeroDivisionError" in line["exception"]


def test_text_cannot_forge_a_line() -> None:
    (line,) = lines_of("log.get_logger('ours').info('named', name='a\\n{\"event\": \"forged\"}')")
    assert line["event"] == "named"


def test_lower_levels_are_dropped() -> None:
    code = "one = log.get_logger('ours')\none.info('low')\none.warning('high')\n"
    assert [line["event"] for line in lines_of(code, "WARNING")] == ["high"]


def test_chatty_libraries_are_heard_from_warnings_on() -> None:
    code = (
        "for name in ('nats', 'uvicorn.access', 'httpx', 'opentelemetry'):\n"
        "    logging.getLogger(name).info('chatter')\n"
        "    logging.getLogger(name).warning('trouble')\n"
    )
    assert [line["event"] for line in lines_of(code)] == ["trouble"] * 4
