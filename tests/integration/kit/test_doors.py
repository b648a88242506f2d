"""Whoever starts a service wrongly is told in one line what to do, and no trace of ours."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

USED = "<an address in use>"


@pytest.fixture(scope="module")
def used() -> Iterator[str]:
    """Return an address that something listens on."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield f"127.0.0.1:{other.getsockname()[1]}"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Write the services' secret."""
    file = tmp_path / "secret"
    file.write_text("s" * 64)
    return file


def refused(command: Sequence[str], environment: dict[str, str]) -> str:
    """Run a module that must refuse to start; return its one line for people."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    # What it logged until then is JSON.
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("service", "setting", "value", "says"),
    [
        ("gateway", "NIGHTSHIFT_GATEWAY_GRPC_LISTEN", USED, "Address already in use"),
        ("store", "NIGHTSHIFT_STORE_LISTEN", USED, "Address already in use"),
        ("scheduler", "NIGHTSHIFT_SCHEDULER_LISTEN", "203.0.113.9:1", "Cannot assign"),
        ("executor", "NIGHTSHIFT_EXECUTOR_METRICS_LISTEN", USED, "Address already in use"),
        ("executor", "NIGHTSHIFT_LOG_LEVEL", "LOUD", "is one of DEBUG, INFO"),
        ("store", "NIGHTSHIFT_STORE_DATA_DIR", "/proc/nothing/here", "cannot be used"),
        ("store", "NIGHTSHIFT_STORE_BLOBS_URL", "file:///proc/nothing", "cannot be used"),
        ("store", "NIGHTSHIFT_STORE_DATABASE_URL", "sqlite:////proc/x.db", "cannot be used"),
        ("store", "NIGHTSHIFT_STORE_LEASE_SECONDS", "inf", "a finite number"),
    ],
)
def test_what_cannot_be_used_is_named_by_its_setting(
    tmp_path: Path, secret: Path, used: str, service: str, setting: str, value: str, says: str
) -> None:
    environment = {
        "NIGHTSHIFT_SECRET_FILE": str(secret),
        "NIGHTSHIFT_NATS_URL": "nats://127.0.0.1:1",
        f"NIGHTSHIFT_{service.upper()}_LISTEN": "127.0.0.1:0",
        **({"NIGHTSHIFT_STORE_DATA_DIR": str(tmp_path / "data")} if service == "store" else {}),
        setting: used if value == USED else value,
    }
    line = refused([f"services.{service}.main"], environment)
    assert line.startswith(f"nightshift {service}: ")
    assert setting in line
    assert says in line


def test_an_endpoint_that_is_no_url_is_named(tmp_path: Path) -> None:
    environment = {
        "NIGHTSHIFT_STORE_DATA_DIR": str(tmp_path),
        "NIGHTSHIFT_STORE_BLOBS_URL": "s3://bucket/prefix",
        "NIGHTSHIFT_NATS_URL": "nats://127.0.0.1:1",
        "AWS_ENDPOINT_URL": "127.0.0.1:9000",
    }
    line = refused(["services.store.main"], environment)
    assert line.startswith("nightshift store: AWS_ENDPOINT_URL must be a URL")


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "nightshift.db").write_text("no database " * 1000)
    environment = {
        "NIGHTSHIFT_STORE_DATA_DIR": str(tmp_path),
        "NIGHTSHIFT_NATS_URL": "nats://127.0.0.1:1",
    }
    assert "file is not a database" in refused(["services.store.main"], environment)


def test_words_that_no_service_reads_are_refused() -> None:
    said = refused(["services.scheduler.main", "--window-tick-seconds=1"], {})
    assert "its settings are variables NIGHTSHIFT_SCHEDULER_" in said
