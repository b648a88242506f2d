"""compose.yaml for real, where a container engine answers: built, started, one batch run."""

import gc
import json
import os
import secrets
import socket
import subprocess
import time
import urllib.parse
import warnings
from pathlib import Path

import docker
import openai
import pytest
from docker.errors import DockerException
from docker.utils import parse_host

from tests.deploy import files
from tests.kit.ports import free_port

# Building the images takes minutes where nothing is cached.
pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1_800)]

SERVICES = {"nats", "postgres", "store", "scheduler", "gateway", "executor-simulated"}
BATCH_SECONDS = 60.0


def engine() -> docker.DockerClient | str:
    """Return a client of this machine's container engine, or why none answers."""
    with warnings.catch_warnings():
        # The package leaves a socket on which nobody answers to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            return docker.from_env()
        except DockerException as error:
            reason = str(error)
        gc.collect()
    return reason


def accepts(address: str) -> bool:
    """Tell whether anybody listens on `unix://…` or `tcp://…`; asked without the package."""
    where = urllib.parse.urlsplit(address)
    family = socket.AF_INET if where.hostname else socket.AF_UNIX
    with socket.socket(family) as one:
        one.settimeout(2)
        try:
            one.connect((where.hostname, where.port) if where.hostname else where.path)
        except OSError:
            return False
    return True


class Fleet:
    """compose.yaml under a project name, ports and secrets of its own."""

    def __init__(self, folder: Path) -> None:
        self.project = f"nightshift-test-{secrets.token_hex(4)}"
        self.http_port = str(free_port())
        self._environment = {
            **os.environ,
            "NIGHTSHIFT_VERSION": self.project,
            "NIGHTSHIFT_HTTP_PORT": self.http_port,
            "NIGHTSHIFT_GRPC_PORT": str(free_port()),
            "NIGHTSHIFT_SECRETS_DIR": str(folder),
        }
        roles = ("store", "scheduler", "executor", "operator")
        texts = {
            name: f"{secrets.token_hex(32)}\n"
            for name in ("nightshift", "postgres", *(f"nats-{role}" for role in roles))
        }
        texts["nats"] = "".join(
            f'{role}_password: "{texts[f"nats-{role}"].strip()}"\n' for role in roles
        )
        for name, text in texts.items():
            secret = folder / name
            secret.write_text(text)
            secret.chmod(0o444)

    def run(self, *arguments: str) -> None:
        """Run compose on it; AssertionError with its output where that fails."""
        done = subprocess.run(
            [
                *(str(files.SCRIPTS / "docker-compose"), "--file", str(files.COMPOSE)),
                *("--env-file", os.devnull, "--project-name", self.project),
                *("--profile", "simulated", *arguments),
            ],
            check=False,
            capture_output=True,
            text=True,
            env=self._environment,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_fleet_in_containers_runs_a_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = engine()
    if isinstance(client, str):
        # No silent skip: what is said is that none answers, and that is looked at once more.
        address = str(parse_host(os.environ.get("DOCKER_HOST")))
        assert not accepts(address)
        with capsys.disabled():
            print(f"\nno container engine answers here, compose.yaml is not started ({client})")
        return
    fleet = Fleet(tmp_path)
    try:
        fleet.run("up", "--build", "--detach", "--wait", "--wait-timeout", "300")
        assert healthy_services(client, fleet) == SERVICES
        run_a_batch(f"http://127.0.0.1:{fleet.http_port}/v1")
    finally:
        fleet.run("down", "--volumes", "--timeout", "60")
        for image in client.images.list(filters={"reference": f"*:{fleet.project}"}):
            client.images.remove(image.tags[0])
        client.close()


def healthy_services(client: docker.DockerClient, fleet: Fleet) -> set[str]:
    """Return the services whose containers say that they are healthy."""
    label = f"com.docker.compose.project={fleet.project}"
    return {
        one.labels["com.docker.compose.service"]
        for one in client.containers.list(filters={"label": label, "health": "healthy"})
    }


def run_a_batch(base_url: str) -> None:
    """Run three lines through the official client and look at their answers."""
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "simulated",
                "messages": [{"role": "user", "content": f"Hello {number}"}],
            },
        }
        for number in range(3)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    with openai.OpenAI(base_url=base_url, api_key="none") as api:
        file = api.files.create(file=("lines.jsonl", text.encode()), purpose="batch")
        batch = api.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        deadline = time.monotonic() + BATCH_SECONDS
        while batch.status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing"), batch
            assert time.monotonic() < deadline, batch
            time.sleep(0.2)
            batch = api.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        results = [json.loads(one) for one in api.files.content(batch.output_file_id).iter_lines()]
    assert [one["custom_id"] for one in results] == [line["custom_id"] for line in lines]
    assert {one["response"]["status_code"] for one in results} == {200}
