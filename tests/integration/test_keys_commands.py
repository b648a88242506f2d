"""`nightshift keys` and `usage`, as an operator types them, with and without a running `up`."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from services.cli.shared.admin_calls import put_models
from tests.kit.store import StoreProcess, chat_line
from tests.kit.up import SIMULATED, RunningUp, running_up, wait_until

pytestmark = pytest.mark.slow


def nightshift(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "services.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def create(data: Path, project: str, *arguments: str) -> dict[str, object]:
    """Make a key; returns all that is said of it."""
    done = nightshift(
        *("keys", "create", "--project", project, "--json", "--data", str(data)), *arguments
    )
    assert done.returncode == 0, done.stderr
    made: dict[str, object] = json.loads(done.stdout)
    return made


def listed(data: Path, *arguments: str) -> list[dict[str, object]]:
    """List keys."""
    done = nightshift("keys", "list", "--json", "--data", str(data), *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_key_is_printed_once_and_alone(tmp_path: Path) -> None:
    data = tmp_path / "data"
    done = nightshift("keys", "create", "--project", "p", "--name", "n", "--data", str(data))
    assert done.returncode == 0, done.stderr
    secret = done.stdout.strip()
    assert secret.startswith("nsk-")
    assert len(done.stdout.splitlines()) == 1
    assert "not shown again" in done.stderr
    table = nightshift("keys", "list", "--data", str(data)).stdout
    assert secret not in table
    assert f"{secret[:7]}…{secret[-4:]}" in table
    (key,) = listed(data)
    assert (key["project_id"], key["name"], key["revoked_at"]) == ("p", "n", None)
    for file in data.rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes(), file
    # The store that was started for the moment is gone.
    wait_until(lambda: not list((data / "run").glob("*.pid")))
    revoked = nightshift("keys", "revoke", str(key["id"]), "--data", str(data))
    assert (revoked.returncode, revoked.stdout) == (0, f"revoked {key['id']}\n")
    assert listed(data)[0]["revoked_at"] is not None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["keys", "create", "--project", "Not This"], "1 to 64 of a-z"),
        (["keys", "revoke", "key_none"], "No API key with id 'key_none'"),
        (["keys", "list", "--data", "/nowhere/at/all"], "nothing at /nowhere/at/all"),
        (["usage", "--store", "127.0.0.1:1"], "127.0.0.1:1 does not answer"),
        (["usage", "--store", "here"], "takes HOST:PORT"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "secret").write_text("s" * 64)
    given = arguments if "--data" in arguments else [*arguments, "--data", str(tmp_path / "data")]
    done = nightshift(*given)
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_others_are_let_in_only_with_a_key(tmp_path: Path) -> None:
    """Refused with the command that makes one; made before the first start; then it starts."""
    data = tmp_path / "data"
    arguments = [*SIMULATED, "--listen", "0.0.0.0:0"]
    refused = RunningUp(data, arguments)
    assert refused.process.wait(60) == 1
    refused.stop()
    log = refused.log.read_text()
    assert "other machines" in log
    assert f"nightshift keys create --project P --data {data}" in log
    assert refused.stdout == []
    assert refused.pids() == {}
    made = create(data, "p")
    with running_up(data, arguments) as up:
        assert up.url.startswith("http://0.0.0.0:")
        with openai.OpenAI(base_url=up.base_url, api_key=str(made["secret"])) as client:
            assert [model.id for model in client.models.list()] == ["simulated"]


# contract: 97, 99
def test_keys_and_usage_of_a_running_system(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running_up(data) as up:
        with openai.OpenAI(base_url=up.base_url, api_key="any") as anyone:
            assert list(anyone.batches.list()) == []
            a, b = create(data, "a", "--name", "nightly"), create(data, "b")
            seldom = create(data, "b", "--requests-per-minute", "1")

            def refused() -> bool:
                try:
                    anyone.models.list()
                except openai.AuthenticationError as error:
                    return error.code == "invalid_api_key"
                return False

            wait_until(refused, 5.0, "a key is needed")
        with (
            openai.OpenAI(base_url=up.base_url, api_key=str(a["secret"])) as of_a,
            openai.OpenAI(base_url=up.base_url, api_key=str(b["secret"])) as of_b,
            openai.OpenAI(
                base_url=up.base_url, api_key=str(seldom["secret"]), max_retries=0
            ) as of_seldom,
        ):
            file = of_a.files.create(
                file=("f", chat_line("1") + chat_line("2", max_tokens=0)), purpose="batch"
            )
            batch = of_a.batches.create(
                input_file_id=file.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
                extra_headers={"Idempotency-Key": "once"},
            )
            again = of_a.batches.create(
                input_file_id=file.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
                extra_headers={"Idempotency-Key": "once"},
            )
            assert again.id == batch.id
            with pytest.raises(openai.ConflictError) as conflict:
                of_a.batches.create(
                    input_file_id="file-other",
                    endpoint="/v1/chat/completions",
                    completion_window="24h",
                    extra_headers={"Idempotency-Key": "once"},
                )
            assert conflict.value.response.headers["x-should-retry"] == "false"
            wait_until(lambda: of_a.batches.retrieve(batch.id).status == "completed", 30.0)
            with pytest.raises(openai.NotFoundError):
                of_b.batches.retrieve(batch.id)
            assert list(of_b.files.list()) == []
            of_seldom.models.list()
            with pytest.raises(openai.RateLimitError) as limited:
                of_seldom.models.list()
            assert 0 < int(limited.value.response.headers["retry-after"]) <= 60
            check_usage(data, of_a, str(a["id"]))
            nightshift("keys", "revoke", str(b["id"]), "--data", str(data))

            def ended() -> bool:
                try:
                    of_b.models.list()
                except openai.AuthenticationError:
                    return True
                return False

            wait_until(ended, 5.0, "the key is revoked")
            assert of_a.batches.retrieve(batch.id).id == batch.id


def check_usage(data: Path, client: openai.OpenAI, key_id: str) -> None:
    """Assert that the command and the route say what the batch came to."""
    batch = next(iter(client.batches.list()))
    assert batch.usage is not None
    done = nightshift("usage", "--project", "a", "--json", "--data", str(data))
    (used,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert used == {
        "project": "a",
        "key_id": key_id,
        "key_name": "nightly",
        "batches": 1,
        "lines": 2,
        "completed": 1,
        "failed": 1,
        "input_tokens": batch.usage.input_tokens,
        "cached_tokens": 0,
        "output_tokens": batch.usage.output_tokens,
        "reasoning_tokens": 0,
    }
    assert used["output_tokens"] > 0
    route = client.get("/usage", cast_to=object)
    assert isinstance(route, dict)
    assert route["project"] == "a"
    assert route["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert route["by_key"][0]["key_id"] == key_id
    assert nightshift("usage", "--data", str(data)).stdout.splitlines()[1].startswith("a ")


def test_a_directory_in_use_by_a_store_alone_is_said_so(tmp_path: Path) -> None:
    """The commands start no second store beside it, and take its address instead."""
    store = StoreProcess(tmp_path / "data")
    store.start()
    try:
        wait_until(lambda: _answers(store.address), 20.0)
        refused = nightshift("keys", "create", "--project", "p", "--data", str(store.data))
        assert refused.returncode == 1
        assert refused.stderr.startswith("nightshift: another store works on")
        made = nightshift(
            *("keys", "create", "--project", "p", "--store", store.address),
            NIGHTSHIFT_SECRET_FILE=str(store.data / "secret"),
        )
        assert made.returncode == 0, made.stderr
        assert made.stdout.startswith("nsk-")
        asyncio.run(put_models(store.address, (store.data / "secret").read_text().strip(), ["m"]))
        gone = nightshift(
            *("models", "remove", "m", "--store", store.address),
            NIGHTSHIFT_SECRET_FILE=str(store.data / "secret"),
        )
        assert (gone.returncode, gone.stdout) == (0, "removed m\n"), gone.stderr
    finally:
        store.stop()


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True
