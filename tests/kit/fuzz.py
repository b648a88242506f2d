"""Schemathesis over a running system: requests made of our own description, good and bad ones.

    python -m tests.kit.fuzz --minutes 10 --seed 7      what `make fuzz` runs

No answer may be a 5xx, or other than the description says: status, headers, content type, body.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx2
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.batches import CHAT, ENDED, chat, chats, jsonl
from tests.kit.up import RunningUp, running_up

ROOT: Final = Path(__file__).parent.parent.parent
DESCRIPTION: Final = ROOT / "services" / "gateway" / "openapi.yaml"
SCHEMATHESIS: Final = Path(sys.executable).with_name("schemathesis")

CHECKS: Final = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
    "use_after_free",
)
"""All but those that ask for an API stricter than ours: it ignores unknown query parameters."""

HOOKS: Final = "tests.kit.fuzz_hooks"
"""Loaded by Schemathesis, and importing it, so that nothing here imports them."""
IDS_VARIABLE: Final = "NIGHTSHIFT_FUZZ_IDS"

UNENDING: Final = ("watchBatch",)
"""Its answer is a stream that lasts as long as the batch."""

UPLOADS: Final = 16
"""Each can be completed once."""

OVER_SECONDS: Final = 90.0
"""What a run may take beyond its time: to load the description, and to narrow down a failure."""


@dataclass(frozen=True)
class Found:
    """What a run came to."""

    passed: bool
    report: str


@contextmanager
def fuzzed_system(data: Path) -> Iterator[tuple[RunningUp, dict[str, list[str]]]]:
    """Run a system with files and batches in several states; yields it and their ids."""
    # Endpoints may be made, and all that is sent to them goes to a port where nobody listens.
    environment = {"NIGHTSHIFT_STORE_WEBHOOKS_ALLOW_PRIVATE": "true"}
    with running_up(data, environment=environment) as running:
        yield running, _objects(running)


def _objects(running: RunningUp) -> dict[str, list[str]]:
    with OpenAI(base_url=running.base_url, api_key="x") as client:

        def upload(lines: bytes) -> str:
            return client.files.create(file=("in.jsonl", lines), purpose="batch").id

        inputs = [
            upload(jsonl([*chats(5), chat("refused", n=0)])),
            upload(jsonl([chat("slow", x_simulate={"delay_ms": 900_000}), *chats(2)])),
            upload(b'{"custom_id":1}\n{broken\n'),
        ]
        batches = [
            client.batches.create(
                input_file_id=each, endpoint=CHAT, completion_window="24h", metadata={"k": "v"}
            )
            for each in inputs
        ]
        deadline = time.monotonic() + 20
        while client.batches.retrieve(batches[0].id).status not in ENDED:
            assert time.monotonic() < deadline, "the first batch does not end"
            time.sleep(0.05)
        outputs = [file.id for file in client.files.list(purpose="batch_output")]
        uploads, parts = _uploads(client)
    return {
        "upload_id": uploads,
        "part_ids": parts,
        "batch_id": [batch.id for batch in batches],
        "file_id": [*inputs, *outputs],
        "input_file_id": inputs,
        "model_id": ["simulated"],
    }


def _uploads(client: OpenAI) -> tuple[list[str], list[str]]:
    """Return uploads that wait to be completed, and the one part of each."""
    content = jsonl(chats(1))
    uploads = [
        client.uploads.create(
            bytes=len(content), filename="in.jsonl", mime_type="text/plain", purpose="batch"
        ).id
        for _ in range(UPLOADS)
    ]
    parts = [client.uploads.parts.create(each, data=("part", content)).id for each in uploads]
    return uploads, parts


def fuzz(url: str, ids: dict[str, list[str]], seconds: float, seed: int) -> Found:
    """Send requests for so long and judge the answers; the report is what Schemathesis prints."""
    command = [
        *(str(SCHEMATHESIS), "run", str(DESCRIPTION), "--url", url),
        *("--checks", ",".join(CHECKS)),
        *("--max-time", str(max(1, round(seconds))), "--seed", str(seed)),
        *("--max-failures", "20", "--continue-on-failure", "--request-timeout", "20"),
        *("--warnings", "off"),
    ]
    for name in UNENDING:
        command += ["--exclude-operation-id", name]
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            command,
            cwd=scratch,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "SCHEMATHESIS_HOOKS": HOOKS,
                IDS_VARIABLE: json.dumps(ids),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds + OVER_SECONDS,
            check=False,
        )
    return Found(passed=done.returncode == 0, report=done.stdout)


def answered(url: str) -> dict[str, dict[str, int]]:
    """Return how often each route gave each status, `POST /v1/files` → `200` → 7."""
    found: dict[str, dict[str, int]] = {}
    for family in text_string_to_metric_families(httpx2.get(f"{url}/metrics").text):
        if family.name == "nightshift_http_requests":
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    labels = sample.labels
                    counts = found.setdefault(f"{labels['method']} {labels['route']}", {})
                    counts[labels["status"]] = int(sample.value)
    return found


def main() -> int:
    """Start a system, fuzz it, print the report; exit status 1 where something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=round(time.time()))
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as scratch,
        fuzzed_system(Path(scratch) / "data") as (running, ids),
    ):
        found = fuzz(running.url, ids, asked.minutes * 60, asked.seed)
        print(found.report)
        for route, counts in sorted(answered(running.url).items()):
            shown = ", ".join(f"{status}: {count}" for status, count in sorted(counts.items()))
            print(f"{route:60} {shown}")
    return 0 if found.passed else 1


if __name__ == "__main__":
    sys.exit(main())
