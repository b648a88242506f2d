"""What one project, Bob, gets beside a bad neighbour, as a share of what it gets alone."""

import contextlib
import http.client
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from benchmarks import bad_clients
from benchmarks.processes import Meter
from benchmarks.report import Row, at_least, at_most, percentile
from benchmarks.system import ENDED, Api, Json, Refused, System, running, simulated_lines
from benchmarks.workshop import Workshop

NAME: Final = "neighbours"
SHARE: Final = 0.8

_ARGUMENTS: Final = ("--engine", "simulated", "--executors", "2")
_ENVIRONMENT: Final = {"NIGHTSHIFT_STORE_WEBHOOKS_ALLOW_PRIVATE": "true"}
_SEATS: Final = 128
_LINES: Final = 15_000
_LINE_MS: Final = 100
_BESIDE_SECONDS: Final = 40.0
"""Bob is given so long beside each neighbour; what is not done by then is not counted."""
_ASKING_SECONDS: Final = 8.0
_SETTLE_SECONDS: Final = 3.0
_EVENTS: Final = 5

POISON: Final = 60
BODIES: Final = 8
HANGING: Final = 8
BATCHES: Final = 40
WATCHERS: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What Bob got."""

    rate: float = 0.0
    p50_ms: float = 0.0
    refused: int = 0


def measure(workshop: Workshop) -> Iterator[Row]:
    """One system for each neighbour; Bob first alone on it, then beside it."""
    for name, beside, bob in (
        (f"{POISON} poison lines", _poison, _work),
        ("huge bodies", _bodies, _work),
        (f"{bad_clients.UPLOADS} idle uploads", _uploads, _work),
        (f"{bad_clients.CONNECTIONS} connections of unknown keys", _keys, _ask),
    ):
        with _two_projects() as (system, bobs, alices):
            alone = bob(bobs)
            with beside(system, alices):
                worse = bob(bobs)
        workshop.say(f"{name}: alone {alone}, beside {worse}")
        yield from _compared(name, alone, worse)
    yield from _measure_webhooks(workshop)
    yield from _measure_watchers(workshop)


def _compared(name: str, alone: Figures, worse: Figures) -> Iterator[Row]:
    if alone.rate:
        yield at_least(
            NAME,
            f"{name}: lines/s beside ÷ alone",
            worse.rate / alone.rate,
            SHARE,
            detail=f"{worse.rate:.0f} and {alone.rate:.0f}",
        )
    yield at_least(
        NAME,
        f"{name}: p50 of requests alone ÷ beside",
        alone.p50_ms / worse.p50_ms,
        SHARE,
        detail=f"{alone.p50_ms:.1f} and {worse.p50_ms:.1f} ms",
    )
    yield at_most(NAME, f"{name}: refused requests", worse.refused - alone.refused, 0)


# --- two projects --------------------------------------------------------------------------------


@contextlib.contextmanager
def _two_projects() -> Iterator[tuple[System, Api, Api]]:
    with running(_ARGUMENTS, _ENVIRONMENT) as system:
        bob, alice = (Api(system.up.url, _make_key(system, name)) for name in ("bob", "alice"))
        system.api = bob
        # Both executors have to be there.
        system.wait_serving(simulated_lines(4_000), 60)
        yield system, bob, alice
        alice.close()


def _make_key(system: System, project: str) -> str:
    command = [sys.executable, "-m", "services.cli.main", "keys", "create"]
    made = subprocess.run(
        [*command, "--project", project, "--data", str(system.up.data)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return made.stdout.strip()


# --- what Bob does -------------------------------------------------------------------------------


class _Calls:
    """Counts what is refused, and tries again until the time is over."""

    def __init__(self, seconds: float) -> None:
        self.times: list[float] = []
        self.refused = 0
        self._until = time.monotonic() + seconds

    def late(self) -> bool:
        return time.monotonic() > self._until

    def call(self, call: Callable[[], Any]) -> Any:
        """Return the answer; None when the time is over."""
        while not self.late():
            began = time.monotonic()
            try:
                answer = call()
            except (Refused, OSError, http.client.HTTPException):
                self.refused += 1
                time.sleep(0.2)
            else:
                self.times.append((time.monotonic() - began) * 1e3)
                return answer
        return None


def _work(api: Api) -> Figures:
    """Upload, run a batch, ask how far it is, and fetch its output."""
    calls, asked = _Calls(_BESIDE_SECONDS), _Calls(_BESIDE_SECONDS)
    done, began = 0, time.monotonic()
    lines = simulated_lines(_LINES, simulate={"delay_ms": _LINE_MS})
    file_id = calls.call(lambda: api.upload(lines))
    batch: Json | None = file_id and calls.call(lambda: api.create(file_id))
    while batch and batch["status"] not in ENDED and not asked.late():
        batch_id = batch["id"]
        time.sleep(0.02)
        batch = asked.call(lambda batch_id=batch_id: api.batch(batch_id))  # type: ignore[misc]
        done = batch["request_counts"]["completed"] if batch else done
    rate = done / (time.monotonic() - began)
    if batch and (output := batch.get("output_file_id")):
        calls.call(lambda: api.content(output))
    return Figures(
        rate=rate,
        p50_ms=percentile(asked.times or [_BESIDE_SECONDS * 1e3], 50),
        refused=calls.refused + asked.refused,
    )


def _ask(api: Api) -> Figures:
    """Ask, as one who waits does."""
    asked = _Calls(_ASKING_SECONDS)
    while not asked.late():
        asked.call(lambda: api.get("/v1/batches?limit=1"))
        time.sleep(0.01)
    times = asked.times or [_ASKING_SECONDS * 1e3]
    return Figures(p50_ms=percentile(times, 50), refused=asked.refused)


# --- the neighbours ------------------------------------------------------------------------------


@contextlib.contextmanager
def _poison(_system: System, alice: Api) -> Iterator[None]:
    file_id = alice.upload(simulated_lines(POISON, simulate={"crash": True}))
    alice.create(file_id)
    time.sleep(_SETTLE_SECONDS)
    yield


@contextlib.contextmanager
def _bodies(_system: System, alice: Api) -> Iterator[None]:
    with contextlib.suppress(Refused):
        alice.create(alice.upload(bad_clients.long_lists(BODIES)))
    with bad_clients.apart(bad_clients.huge_uploads, alice.url, alice.key):
        yield


@contextlib.contextmanager
def _uploads(_system: System, alice: Api) -> Iterator[None]:
    with bad_clients.apart(bad_clients.idle_uploads, alice.url, alice.key):
        yield


@contextlib.contextmanager
def _keys(_system: System, alice: Api) -> Iterator[None]:
    with bad_clients.apart(bad_clients.unknown_keys, alice.url, alice.key):
        yield


# --- webhooks ------------------------------------------------------------------------------------


def _measure_webhooks(workshop: Workshop) -> Iterator[Row]:
    """From creating a batch of one line to its event."""
    quick, hanging = bad_clients.Receiver(answers=True), bad_clients.Receiver(answers=False)
    try:
        with _two_projects() as (_, bob, alice):
            _endpoint(bob, quick)
            alone = _events(bob, quick)
            for _ in range(HANGING):
                _endpoint(alice, hanging)
            file_id = alice.upload(simulated_lines(1))
            for _ in range(BATCHES):
                alice.create(file_id)
            time.sleep(_SETTLE_SECONDS)
            beside = _events(bob, quick)
    finally:
        hanging.ended.set()
        for receiver in (quick, hanging):
            receiver.shutdown()
            receiver.server_close()
    workshop.say(f"hanging receivers: alone {alone}, beside {beside}")
    yield at_least(
        NAME,
        f"{HANGING} receivers that hang, {BATCHES} batches: p50 of a webhook alone ÷ beside",
        percentile(alone, 50) / percentile(beside, 50),
        SHARE,
        detail=f"{percentile(alone, 50):.2f} and {percentile(beside, 50):.2f} s; "
        f"at most {_BESIDE_SECONDS:.0f} s were waited",
    )


def _endpoint(api: Api, receiver: bad_clients.Receiver) -> None:
    api.post(
        "/v1/webhook_endpoints",
        {"name": "n", "url": receiver.url, "event_types": ["batch.completed"]},
    )


def _events(api: Api, receiver: bad_clients.Receiver) -> list[float]:
    """Return how long events took; one that does not come in time ends it."""
    file_id = api.upload(simulated_lines(1))
    times = []
    while len(times) < _EVENTS and sum(times) < _BESIDE_SECONDS:
        began = time.monotonic()
        api.create(file_id)
        receiver.got.acquire(timeout=_BESIDE_SECONDS)
        times.append(time.monotonic() - began)
    return times


# --- watchers ------------------------------------------------------------------------------------


def _measure_watchers(workshop: Workshop) -> Iterator[Row]:
    """Bob's requests, and the store's CPU, beside one watcher and beside many."""
    found = []
    with _two_projects() as (system, bob, alice):
        lines = simulated_lines(_SEATS * 25, simulate={"delay_ms": _SEATS / 64 * 1e3})
        batch = alice.create(alice.upload(lines))
        for count in (1, WATCHERS):
            with bad_clients.apart(bad_clients.watchers, alice.url, alice.key, batch["id"], count):
                meter = Meter(system.pids())
                figures = _ask(bob)
                used = {one.name: one.cpu_seconds for one in meter.stop()}
            found.append((figures, *(used[name] / meter.seconds for name in ("store", "gateway"))))
            workshop.say(f"{count} watchers: {found[-1]}")
        if alice.batch(batch["id"])["status"] != "in_progress":
            raise Refused("the batch that was watched ended too early")
    (alone, store, gateway), (worse, more, gateways) = found
    yield from _compared(f"{WATCHERS} watchers, not one", alone, worse)
    yield Row(
        bench=NAME,
        what=f"share of a core that the store takes with {WATCHERS} watchers",
        value=more,
        detail=f"{store:.2f} with one; the gateway {gateways:.2f} and {gateway:.2f}. Bob asks "
        "meanwhile, the batch does 64 lines/s",
    )
