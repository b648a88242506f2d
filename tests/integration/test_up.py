"""`nightshift up` and the commands beside it, as a user runs them: real processes, real sockets."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from click.testing import CliRunner

from services.cli.main import main
from tests.kit.nats_server import refuses_strangers
from tests.kit.up import RunningUp, is_running, running_up, wait_until

pytestmark = pytest.mark.slow

CREDENTIALS = {
    "AWS_SECRET_ACCESS_KEY": "x",
    "PGPASSWORD": "x",
    "NIGHTSHIFT_STORE_MAX_REPORTED_ERRORS": "100",
    "HF_TOKEN": "x",
    "CUDA_CACHE_PATH": "/x",
    "VLLM_API_KEY": "x",
    "OPENAI_API_KEY": "x",
    "NIGHTSHIFT_API_KEY": "x",
    # Its children log in at its own broker, whoever they are elsewhere.
    "NIGHTSHIFT_NATS_USER": "x",
    "OTEL_SERVICE_NAMESPACE": "x",
}
CHILDREN = {"nats", "store", "scheduler", "gateway", "executor-0"}


def run_up(*arguments: str) -> tuple[int, str, str]:
    """Run a `nightshift up` that ends by itself; returns exit status, standard output and error."""
    done = subprocess.run(
        [sys.executable, "-m", "services.cli.main", "up", *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def nightshift(*arguments: str, url: str = "http://127.0.0.1:9/v1") -> tuple[int, str, str]:
    """Run a client's command in this process; returns exit status, standard output and error."""
    done = CliRunner().invoke(main, arguments, env={"NIGHTSHIFT_URL": url})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def requests(count: int, **body: object) -> bytes:
    """Return `count` chat lines as JSONL."""
    return b"".join(
        json.dumps(
            {
                "custom_id": f"r{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": "simulated",
                    "messages": [{"role": "user", "content": f"line {number}"}],
                    **body,
                },
            }
        ).encode()
        + b"\n"
        for number in range(count)
    )


def answers(address: str) -> bool:
    """Tell whether something listens there."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
        return True
    return False


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    """Run one system for the tests that leave it as they found it."""
    data = tmp_path_factory.mktemp("up") / "data"
    with running_up(data, environment=CREDENTIALS) as running:
        yield running


def test_it_says_where_it_is_and_nothing_else(shared: RunningUp) -> None:
    assert shared.stdout == [f"ready: {shared.url}", f"grpc: {shared.grpc}"]
    assert shared.url.startswith("http://127.0.0.1:")
    assert answers(shared.url.removeprefix("http://"))
    assert answers(shared.grpc)


def test_run_holds_exactly_the_pids_of_its_children(shared: RunningUp) -> None:
    assert {file.name for file in (shared.data / "run").iterdir()} == {
        f"{name}.pid" for name in CHILDREN
    }
    assert all(is_running(pid) for pid in shared.pids().values())


def test_all_state_is_for_its_owner_only(shared: RunningUp) -> None:
    assert shared.data.stat().st_mode & 0o777 == 0o700
    for name in ("secret", "nats.conf", "nats-passwords/executor"):
        assert (shared.data / name).stat().st_mode & 0o777 == 0o600


def test_each_child_has_the_credentials_that_it_needs_and_no_others(shared: RunningUp) -> None:
    has = {}
    for child, pid in shared.pids().items():
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        names = {entry.partition(b"=")[0].decode() for entry in environment}
        has[child] = names & (CREDENTIALS.keys() | {"NIGHTSHIFT_NATS_PASSWORD_FILE"})
        has[child] -= {"NIGHTSHIFT_NATS_USER"}
        assert {"PATH", "HOME"} <= names
    assert has == {
        "nats": set(),
        "gateway": {"OTEL_SERVICE_NAMESPACE"},
        "scheduler": {"OTEL_SERVICE_NAMESPACE", "NIGHTSHIFT_NATS_PASSWORD_FILE"},
        "executor-0": {"OTEL_SERVICE_NAMESPACE", "NIGHTSHIFT_NATS_PASSWORD_FILE"}
        | {"HF_TOKEN", "CUDA_CACHE_PATH", "VLLM_API_KEY"},
        "store": {"OTEL_SERVICE_NAMESPACE", "NIGHTSHIFT_NATS_PASSWORD_FILE"}
        | {"AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "NIGHTSHIFT_STORE_MAX_REPORTED_ERRORS"},
    }


def test_its_broker_takes_nobody_without_a_password(shared: RunningUp) -> None:
    addresses = json.loads((shared.data / "addresses.json").read_text())
    assert refuses_strangers(addresses["nats"])


def test_a_second_one_on_the_same_directory_is_refused(shared: RunningUp) -> None:
    status, out, err = run_up(
        *("--engine", "simulated", "--listen", "127.0.0.1:0", "--data", str(shared.data))
    )
    assert status == 1
    assert out == ""
    assert f"in use by `nightshift up` (process {shared.process.pid})" in err
    assert "--data" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("option", ["--listen", "--grpc"])
def test_a_taken_port_is_refused_by_name(shared: RunningUp, tmp_path: Path, option: str) -> None:
    taken = shared.grpc
    other = ["--listen", "127.0.0.1:0"] if option == "--grpc" else []
    status, out, err = run_up(
        *("--engine", "simulated", "--data", str(tmp_path / "data"), *other, option, taken)
    )
    assert (status, out) == (1, "")
    assert f"{taken} is in use" in err
    assert option in err


@pytest.mark.parametrize("option", ["--listen", "--grpc"])
def test_an_address_of_another_machine_is_refused_by_name(tmp_path: Path, option: str) -> None:
    other = ["--listen", "127.0.0.1:0"] if option == "--grpc" else []
    status, out, err = run_up(
        *("--engine", "simulated", "--data", str(tmp_path / "data"), *other),
        *(option, "203.0.113.9:0"),
    )
    assert (status, out) == (1, "")
    assert "203.0.113.9" in err
    assert option in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--engine simulated"),
        (["--engine", "simulated", "--listen", "example.org:8000"], "127.0.0.1:8000"),
        (["--model", "m=/nowhere/at/all"], "nothing at /nowhere/at/all"),
        (["--model", "m=/"], "has a config.json"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    status, out, err = run_up("--data", str(tmp_path / "data"), *arguments)
    assert (status, out) == (2, "")
    assert says in err
    assert not (tmp_path / "data").exists()


def test_a_setting_that_does_not_fit_stops_the_start(tmp_path: Path) -> None:
    up = RunningUp(tmp_path / "data", environment={"NIGHTSHIFT_STORE_NO_SUCH_THING": "1"})
    assert up.process.wait(30) == 1
    assert "NIGHTSHIFT_STORE_NO_SUCH_THING" in up.log.read_text()
    assert up.stop() == 1
    assert up.stdout == []
    assert up.pids() == {}


@pytest.mark.parametrize("name", sorted(CHILDREN))
def test_a_killed_child_is_back_on_its_address(shared: RunningUp, name: str) -> None:
    before = shared.pids()
    began = time.monotonic()
    old = shared.kill(name)
    new = shared.wait_restarted(name, old, within_seconds=5.0)
    # Far from the waits of one that dies again and again.
    assert time.monotonic() - began < 2.5
    assert is_running(new)
    after = shared.pids()
    assert {n: pid for n, pid in after.items() if n != name} == {
        n: pid for n, pid in before.items() if n != name
    }
    addresses = json.loads((shared.data / "addresses.json").read_text())
    kept = {"nats": ["nats"], "store": ["store"], "gateway": ["rest", "grpc"]}.get(name, [])
    for service in kept:
        wait_until(lambda: answers(addresses[service]), 10, f"{service} listens again")  # noqa: B023


def test_a_batch_runs_after_all_were_killed(shared: RunningUp) -> None:
    client = openai.OpenAI(base_url=shared.base_url, api_key="x", max_retries=10)
    file = client.files.create(file=("in.jsonl", requests(50)), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 30, "completed")
    ended = client.batches.retrieve(batch.id)
    assert ended.request_counts is not None
    assert ended.request_counts.completed == 50


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    with running_up(tmp_path / "data") as up:
        tree = up.tree()
        assert set(up.pids().values()) < set(tree)
        assert up.stop(number) == 0
        assert [pid for pid in tree if is_running(pid)] == []
        assert list((up.data / "run").iterdir()) == []


def test_a_signal_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    up = RunningUp(tmp_path / "data")
    wait_until(lambda: "store" in up.pids(), 30, "the store is started")
    tree = up.tree()
    assert up.stop() == 0
    assert [pid for pid in tree if is_running(pid)] == []
    assert up.stdout == []


def test_nothing_outlives_a_killed_up_and_starting_again_goes_on(tmp_path: Path) -> None:
    with running_up(tmp_path / "data") as up:
        client = openai.OpenAI(base_url=up.base_url, api_key="x")
        file = client.files.create(file=("in.jsonl", requests(3)), purpose="batch")
        tree = up.tree()
        up.process.kill()
        up.process.wait()
    # It waits for the end of what the killed one left.
    with running_up(tmp_path / "data") as up:
        assert [pid for pid in tree if is_running(pid)] == []
        client = openai.OpenAI(base_url=up.base_url, api_key="x")
        assert client.files.content(file.id).content == requests(3)


def test_two_models_are_known_at_once_and_get_executors_each(tmp_path: Path) -> None:
    arguments = ["--engine", "simulated", "--model", "a", "--model", "b=x", "--executors", "2"]
    with running_up(
        tmp_path / "data",
        [*arguments, "--gpus", "a: 2,3", "--gpus", "b: 0,1", "--default-max-tokens", "b: 7"],
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3"},
    ) as up:
        models = openai.OpenAI(base_url=up.base_url, api_key="x").models.list()
        assert [model.id for model in models] == ["a", "b"]
        names = {f"executor-{number}" for number in range(4)}
        assert up.pids().keys() == (CHILDREN - {"executor-0"}) | names
        seen = []
        for name in sorted(names):
            pid = up.pids()[name]
            pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
            variables = dict(pair.split("=", 1) for pair in pairs if pair)
            seen.append((variables["NIGHTSHIFT_EXECUTOR_POOL"], variables["CUDA_VISIBLE_DEVICES"]))
            tokens = variables.get("NIGHTSHIFT_EXECUTOR_DEFAULT_MAX_TOKENS")
            assert tokens == ("7" if seen[-1][0] == "b" else None)
        assert seen == [("a", "2"), ("a", "3"), ("b", "0"), ("b", "1")]


# --- the commands beside it ------------------------------------------------------------------


def test_submit_and_watch_to_the_end_in_plain_lines(shared: RunningUp, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(requests(3) + requests(1, temperature=9).replace(b'"r0"', b'"bad"'))
    status, out, err = nightshift("submit", str(path), "--watch", url=shared.base_url)
    assert status == 0, err
    lines = out.splitlines()
    batch_id = lines[0].split()[0]
    assert lines[-1] == f"{batch_id} completed: 4/4 lines, 1 failed"
    assert f"nightshift results {batch_id} --errors FILE" in err

    output, errors = tmp_path / "out.jsonl", tmp_path / "err.jsonl"
    status, out, err = nightshift(
        *("results", batch_id, "--output", str(output), "--errors", str(errors)), url=shared.url
    )
    assert (status, out) == (0, ""), err
    done = [json.loads(line)["custom_id"] for line in output.read_text().splitlines()]
    assert done == ["r0", "r1", "r2"]
    (failed,) = [json.loads(line) for line in errors.read_text().splitlines()]
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("bad", 400)

    status, out, err = nightshift("results", batch_id, url=shared.url)
    assert (status, out) == (0, output.read_text())
    assert "1 line(s) failed" in err

    status, out, _ = nightshift("list", url=shared.url)
    assert status == 0
    head = "ID STATUS DONE FAILED LINES CREATED WAITING FOR"
    assert out.splitlines()[0].split() == head.split()
    assert out.splitlines()[1].split()[:5] == [batch_id, "completed", "3", "1", "4"]


def test_json_is_one_object_a_line(shared: RunningUp, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(requests(2))
    status, out, err = nightshift(
        *("submit", str(path), "--json", "--metadata", "who=me"), url=shared.base_url
    )
    assert (status, err) == (0, "")
    batch = json.loads(out)
    assert batch["metadata"] == {"who": "me"}
    status, out, err = nightshift("watch", batch["id"], "--json", url=shared.base_url)
    assert (status, err) == (0, "")
    states = [json.loads(line) for line in out.splitlines()]
    assert states[-1]["status"] == "completed"
    assert states[-1]["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    _, out, _ = nightshift("list", "--json", "--limit", "1", url=shared.base_url)
    assert [json.loads(line)["id"] for line in out.splitlines()] == [batch["id"]]
    _, out, _ = nightshift("models", "--json", url=shared.base_url)
    assert [json.loads(line)["id"] for line in out.splitlines()] == ["simulated"]


def test_a_batch_that_fails_says_where_and_ends_with_3(shared: RunningUp, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(requests(1) + b"no json\n")
    status, _, err = nightshift("submit", str(path), "--watch", url=shared.base_url)
    assert status == 3
    assert "line 2: " in err


def test_cancel_ends_a_batch_that_watch_ends_with_3(shared: RunningUp, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(requests(2, x_simulate={"delay_ms": 600_000}))
    status, out, _ = nightshift("submit", str(path), url=shared.base_url)
    assert status == 0
    batch_id = out.strip()

    # Its object says what it would wait for.
    _, out, _ = nightshift("list", "--json", "--limit", "1", url=shared.base_url)
    assert json.loads(out)["nightshift"].keys() >= {"pool", "queue_position", "reason"}
    status, out, err = nightshift("cancel", batch_id, url=shared.base_url)
    assert status == 0, err
    assert out.split()[0] == batch_id
    status, out, _ = nightshift("watch", batch_id, url=shared.base_url)
    assert status == 3
    assert out.splitlines()[-1].split()[1].startswith("cancelled")


def test_an_unknown_batch_is_one_line_and_1(shared: RunningUp) -> None:
    for command in ("watch", "cancel", "results"):
        status, out, err = nightshift(command, "batch_nothere", url=shared.base_url)
        assert (status, out) == (1, "")
        assert err.count("\n") == 1
        assert "HTTP 404" in err


@pytest.mark.parametrize("command", [["list"], ["watch", "batch_1"], ["models"]])
def test_no_server_is_one_line_that_says_what_to_start(command: list[str]) -> None:
    status, out, err = nightshift(*command)
    assert (status, out) == (4, "")
    assert "nightshift up" in err
    assert err.count("\n") == 1


def test_a_file_without_a_url_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("not json\n")
    status, _, err = nightshift("submit", str(path))
    assert status == 2
    assert "--endpoint" in err


def test_a_model_can_be_removed(tmp_path: Path) -> None:
    arguments = ["--engine", "simulated", "--model", "one", "--model", "two"]
    with running_up(tmp_path / "data", arguments) as up:
        assert nightshift("models", url=up.base_url)[1].split() == ["one", "two"]
        status, out, err = nightshift("models", "remove", "one", "--data", str(up.data))
        assert (status, out) == (0, "removed one\n"), err
        assert "two" in nightshift("models", url=up.base_url)[1].split()
        status, _, err = nightshift("models", "remove", "none", "--data", str(up.data))
        assert status == 1
        assert "Traceback" not in err


def test_the_demo_runs_from_start_to_stop() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.cli.commands.demo", "--engine", "simulated"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "refused-by-the-engine: HTTP 400" in done.stdout
    # What batching gains is measured with lines alike on both sides.
    assert "48 short questions, 16 tokens to each answer" in done.stdout
    assert "one batch:     48 lines, 48 tokens in" in done.stdout
    assert "one at a time: 6 lines, 6 tokens in" in done.stdout
    assert "ratio:" in done.stdout
    assert "completed: 40/40 lines, 1 failed" in done.stdout
