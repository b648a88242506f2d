"""`make run`: one example batch through every service and a real model, shown step by step."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
from openai import OpenAI
from openai.types import Batch

from services.cli.shared.openai_client import open_client
from services.cli.shared.progress import ENDED, choose_display, follow, spoken_seconds
from services.cli.up.plan import SIMULATED, VLLM

EXAMPLE: Final = Path(__file__).with_name("examples") / "demo.jsonl"

# One of each kind.
_SHOWN: Final = ("fact-01", "extract-name", "classify-01", "cook-01", "write-01", "follow-up")

# What batching gains is measured with lines alike: short questions, each answered with as many
# tokens, whether the model would stop earlier or not.
_ALIKE_PREFIX: Final = "fact-"
_ALIKE_TOKENS: Final = 16
_ALIKE_BATCHED: Final = 48
_ALIKE_SINGLE: Final = 6

# Generous: a large model from a slow disk takes minutes.
_ENGINE_SECONDS: Final = 1_800.0
_HEARTBEAT_SECONDS: Final = 10.0
_STOP_SECONDS: Final = 60.0

Request = dict[str, Any]


class DemoError(Exception):
    """A step did not work; the message says which, and where to look."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Lines run in some way: how many, the tokens they made, the seconds they took."""

    lines: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Return the speed."""
        return self.tokens / self.seconds

    def __str__(self) -> str:
        """Return it as it is shown."""
        return (
            f"{self.lines} lines, {self.tokens:,} tokens in {self.seconds:.1f} s: "
            f"{self.tokens_per_second:,.1f} tokens/s"
        )


def say(text: str) -> None:
    """Announce a step, at once."""
    print(f"==> {text}", flush=True)


def detail(text: str) -> None:
    """Say something about the step, at once."""
    print(f"    {text}", flush=True)


def prepare_small_model() -> str:
    """Have the small model made where it is missing; returns its folder.

    Raises:
        DemoError: it cannot be made; the reason stands on standard error.
    """
    say("Preparing SmolLM2-135M-Instruct (usually a second; 30 s the first time)")
    # In a process of its own: converting takes gigabytes that the rest of this needs.
    made = subprocess.run(
        [sys.executable, "-m", "services.executor.small_model"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if made.returncode or not made.stdout.strip():
        raise DemoError("the small model cannot be prepared; name one with MODEL=path or name")
    return made.stdout.strip().splitlines()[-1]


class System:
    """A `nightshift up` of our own."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        """Start it in `folder`; `base_url` is known from then on.

        Raises:
            DemoError: it ended instead.
        """
        self._data = folder / "data"
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "services.cli.main", "up"),
                    *("--data", str(self._data), "--listen", "127.0.0.1:0", *arguments),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "NIGHTSHIFT_DIE_WITH_PARENT": str(os.getpid())},
                # Ctrl-C is for us: we stop it, once.
                process_group=0,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("ready: "):
            self._process.wait()
            raise DemoError(f"the services did not start; their log ends with\n{self.log_end()}")
        self.base_url = f"{line.removeprefix('ready: ').strip()}/v1"

    def engine_failure(self) -> str:
        """Return why the engine did not start; empty while nothing says so."""
        for line in self._log.read_text(errors="replace").splitlines():
            event: Any = None
            # Libraries write lines of their own among ours.
            with contextlib.suppress(ValueError):
                event = json.loads(line)
            if not isinstance(event, dict):
                continue
            if event.get("event") == "engine_start_failed":
                return str(event.get("reason"))
            if event.get("event") == "child_ended" and event.get("child") == "executor-0":
                return "the executor ended"
        return ""

    def log_end(self, lines: int = 20) -> str:
        """Return the last lines of all services' log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """Have it drain and end."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            # Its guard ends what it leaves.
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextlib.contextmanager
def started_system(arguments: Sequence[str]) -> Iterator[System]:
    """Run a system on a data directory of its own, and leave nothing of either."""
    with tempfile.TemporaryDirectory(prefix="nightshift-demo-") as folder:
        say("Starting NATS and all services (usually 3 s)")
        system = System(Path(folder), arguments)
        try:
            detail(f"listening at {system.base_url}")
            yield system
        finally:
            say("Stopping (usually 5 s)")
            system.stop()


def submit(client: OpenAI, requests: Sequence[Request]) -> Batch:
    """Upload requests and create a batch of them."""
    content = "".join(json.dumps(request) + "\n" for request in requests).encode()
    file = client.files.create(file=("demo.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )


def result_lines(client: OpenAI, batch: Batch) -> dict[str, dict[str, Any]]:
    """Return a batch's result and error lines by `custom_id`."""
    found = {}
    for file_id in (batch.output_file_id, batch.error_file_id):
        if file_id is not None:
            for line in client.files.content(file_id).text.splitlines():
                result = json.loads(line)
                found[result["custom_id"]] = result
    return found


def tokens_of(results: dict[str, dict[str, Any]]) -> int:
    """Return the tokens that were generated."""
    bodies = ((result.get("response") or {}).get("body") or {} for result in results.values())
    return sum((body.get("usage") or {}).get("completion_tokens", 0) for body in bodies)


def wait_for_engine(client: OpenAI, system: System, request: Request, usual: str) -> None:
    """Run one line and wait for it, which takes as long as the engine needs to load.

    Raises:
        DemoError: the engine ended instead, or takes too long.
    """
    say(f"Loading the model into the engine (usually {usual})")
    began = said = time.monotonic()
    batch = submit(client, [request])
    while batch.status not in ENDED:
        now = time.monotonic()
        failure = system.engine_failure()
        if failure or now - began > _ENGINE_SECONDS:
            raise DemoError(
                f"the engine does not start: {failure or 'it takes too long'}; the log ends with\n"
                f"{system.log_end()}"
            )
        if now - said > _HEARTBEAT_SECONDS:
            said = now
            detail(f"still loading, {now - began:.0f} s")
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    if batch.output_file_id is None:
        raise DemoError(f"the first line failed: {result_lines(client, batch)}")
    detail(f"first answer after {time.monotonic() - began:.1f} s")


def run_example(client: OpenAI, requests: Sequence[Request]) -> dict[str, dict[str, Any]]:
    """Run all requests as one batch, showing progress; returns its result lines.

    Raises:
        DemoError: it did not complete.
    """
    say(f"Running {EXAMPLE.name}: {len(requests)} lines as one batch")
    batch = submit(client, requests)
    batch = follow(client, batch.id, choose_display(as_json=False))
    if batch.status != "completed":
        raise DemoError(f"the batch ended as {batch.status}: {batch.errors}")
    return result_lines(client, batch)


def alike(requests: Sequence[Request], count: int) -> list[Request]:
    """Return so many lines that cost the same: short questions with answers of one length."""
    questions = [line for line in requests if line["custom_id"].startswith(_ALIKE_PREFIX)]
    length = {"max_tokens": _ALIKE_TOKENS, "min_tokens": _ALIKE_TOKENS, "ignore_eos": True}
    return [
        {**line, "custom_id": f"alike-{number}", "body": {**line["body"], **length}}
        for number, line in zip(range(count), itertools.cycle(questions), strict=False)
    ]


def measure(client: OpenAI, batches: Sequence[Sequence[Request]]) -> Measured:
    """Run batches one after the other, each from its upload to its end."""
    seconds = 0.0
    lines = tokens = 0
    for requests in batches:
        began = time.monotonic()
        batch = submit(client, requests)
        while batch.status not in ENDED:
            time.sleep(0.01)
            batch = client.batches.retrieve(batch.id)
        seconds += time.monotonic() - began
        lines += len(requests)
        tokens += tokens_of(result_lines(client, batch))
    return Measured(lines, tokens, seconds)


def show_speed(client: OpenAI, requests: Sequence[Request]) -> None:
    """Run lines alike in one batch, then some of them one at a time, and print both speeds."""
    lines = alike(requests, _ALIKE_BATCHED)
    say(
        f"Measuring: {len(lines)} short questions, {_ALIKE_TOKENS} tokens to each answer, as one "
        f"batch; then {_ALIKE_SINGLE} of them one after the other, each a batch of its own"
    )
    batched = measure(client, [lines])
    single = measure(client, [[line] for line in lines[:_ALIKE_SINGLE]])
    say("Speed, from upload to the end of the batch")
    detail(f"one batch:     {batched}")
    detail(f"one at a time: {single}")
    if single.tokens:
        detail(f"ratio:         {batched.tokens_per_second / single.tokens_per_second:.1f}")


def show_answers(requests: Sequence[Request], results: dict[str, dict[str, Any]]) -> None:
    """Print some questions with their answers, then every line that failed."""
    say("Some of the answers")
    asked = {line["custom_id"]: line["body"]["messages"][-1]["content"] for line in requests}
    for custom_id in _SHOWN:
        # One that a model of the user's own refuses is among those below.
        if _answered(results[custom_id]):
            answer = results[custom_id]["response"]["body"]["choices"][0]["message"]["content"]
            detail(f"{custom_id}: {_one_line(asked[custom_id])}")
            detail(f"  -> {_one_line(answer or '')}")
    say("The lines that failed, from the error file")
    for custom_id, result in results.items():
        if not _answered(result):
            response = result["response"]
            error = result["error"] or response["body"]["error"]
            status = f"HTTP {response['status_code']}: " if response else ""
            detail(f"{custom_id}: {status}{_one_line(error['message'])}")


def _answered(result: dict[str, Any]) -> bool:
    return result["response"] is not None and result["response"]["status_code"] < 300


def _one_line(text: str, width: int = 100) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= width else f"{flat[: width - 1]}…"


def run(engine: str, model: str | None) -> None:
    """Show everything, once.

    Raises:
        DemoError: a step did not work.
    """
    requests: list[Request] = [json.loads(line) for line in EXAMPLE.read_text().splitlines()]
    name = requests[0]["body"]["model"]
    usual = "20 to 60 s on a CPU, a minute or more with a large model"
    if engine == SIMULATED:
        arguments, usual = ["--engine", SIMULATED, "--model", name], "a second"
    elif model is None:
        arguments = ["--model", f"{name}={prepare_small_model()}"]
    else:
        name = Path(model).name
        detail(f"the example's lines ask for {name} this time")
        arguments = ["--model", f"{name}={model}"]
    for request in requests:
        request["body"]["model"] = name
    by_id = {request["custom_id"]: request for request in requests}
    with started_system(arguments) as system:
        client = open_client(system.base_url, "none")
        wait_for_engine(client, system, by_id["fact-02"], usual)
        show_answers(requests, run_example(client, requests))
        show_speed(client, requests)


@click.command()
@click.option("--model", help="A folder or a Hugging Face name.  [default: SmolLM2-135M-Instruct]")
@click.option("--engine", type=click.Choice((VLLM, SIMULATED)), envvar="ENGINE", default=VLLM)
def main(*, model: str | None, engine: str) -> None:
    """Show an example batch running, from start to stop."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # As Ctrl-C does: what runs is stopped and what was made is removed.
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    began = time.monotonic()
    try:
        run(engine, model)
    except DemoError as error:
        print(f"nightshift demo: {error}", file=sys.stderr)
        sys.exit(1)
    say(f"Done in {spoken_seconds(time.monotonic() - began)}")


if __name__ == "__main__":
    main()
