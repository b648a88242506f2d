"""Batches to run while things die, and what each of their lines must give. Pure.

The simulated engine's answer is a function of the line, so that every result can be told right or
wrong from outside.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from services.executor.engines.simulated.bodies import vector
from tests.kit.batches import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    Json,
    answer_to,
    chat,
    request,
    text_of,
)

STALL_SECONDS: Final = 4.0
"""What the executors of a round are told; an engine that makes no step for so long is dead."""
LINE_TIMEOUT_SECONDS: Final = 12.0
"""What the executors of a round are told; a line that hangs is given up after it."""
SHORT_WINDOWS: Final = ("8s", "14s")
"""Completion windows that batches may miss; the gateways of a round are told of them."""

UNSTARTED: Final = {"cancelled": "batch_cancelled", "expired": "batch_expired"}
"""The code of lines that never ran, by how their batch ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A batch to be run.

    Attributes:
        kind: what it is for.
        lines: its input.
        statuses: how it may end, unless it is cancelled.
        endpoint: of its lines.
        window: its completion window.
        cancel_at: share of its lines that are done when it is cancelled; None leaves it.
        deaths: how often its lines end an engine at most, while nothing else does.
    """

    kind: str
    lines: tuple[Json, ...]
    statuses: tuple[str, ...] = ("completed",)
    endpoint: str = CHAT
    window: str = "24h"
    cancel_at: float | None = None
    deaths: int = 0


def steady(rng: random.Random, name: str) -> Order:
    """Some seconds of work for all executors, so that there is always something half done."""
    delay = rng.randint(200, 500)
    count = rng.randint(1_500, 3_500)
    lines = [_slow(name, number, delay) for number in range(count)]
    return Order(kind="steady", lines=tuple(lines))


def mixed(rng: random.Random, name: str) -> Order:
    """Lines of all kinds: plain, slow, long, refused, failing, failing at first, one that hangs."""
    count = rng.randint(80, 400)
    makers: Sequence[Callable[[], Json]] = (
        dict,
        lambda: {"x_simulate": {"delay_ms": rng.randint(1, 400)}},
        lambda: {"x_simulate": {"status": 500, "times": rng.randint(1, 2), "delay_ms": 20}},
        lambda: {"x_simulate": {"status": 429, "times": rng.randint(1, 2)}},
        lambda: {"x_simulate": {"status": 422}},
        lambda: {"x_simulate": {"status": 500}},
        lambda: {"max_tokens": 0},
        lambda: {"x_simulate": {"output_bytes": rng.randint(10, 200_000)}},
    )
    made = rng.choices(makers, (40, 40, 4, 4, 4, 1, 3, 4), k=count)
    lines = [_chat(name, number, **fields()) for number, fields in enumerate(made)]
    if rng.random() < 0.3:
        lines[rng.randrange(count)] = _chat(name, count, x_simulate={"hang": True})
    return Order(kind="mixed", lines=tuple(lines))


def embeddings(rng: random.Random, name: str) -> Order:
    """Texts to embed."""
    lines = [
        request(
            f"{name}-{number}",
            {
                "model": "simulated",
                "input": f"{name} {number}",
                "x_simulate": {"delay_ms": rng.randint(0, 300)},
            },
            EMBEDDINGS,
        )
        for number in range(rng.randint(100, 600))
    ]
    return Order(kind="embeddings", lines=tuple(lines), endpoint=EMBEDDINGS)


def completions(rng: random.Random, name: str) -> Order:
    """A few prompts, answered at once."""
    lines = [
        request(
            f"{name}-{number}", {"model": "simulated", "prompt": f"{name} {number}"}, COMPLETIONS
        )
        for number in range(rng.randint(1, 300))
    ]
    return Order(kind="completions", lines=tuple(lines), endpoint=COMPLETIONS)


def cancelled(rng: random.Random, name: str) -> Order:
    """Cancelled at once, or when some lines are done."""
    delay = rng.randint(100, 500)
    lines = [_slow(name, number, delay) for number in range(rng.randint(200, 1_000))]
    at = 0.0 if rng.random() < 0.3 else rng.uniform(0.05, 0.9)
    return Order(kind="cancelled", lines=tuple(lines), cancel_at=at)


def expiring(rng: random.Random, name: str) -> Order:
    """A window that is too short for some of its lines."""
    # The slow ones stay below the time that a line is given.
    lines = [_slow(name, number, rng.choice((300, 9_000))) for number in range(400)]
    return Order(
        kind="expiring",
        lines=tuple(lines),
        statuses=("expired",),
        window=rng.choice(SHORT_WINDOWS),
    )


def faulty(rng: random.Random, name: str) -> Order:
    """An input with a line that is none: the batch fails before any line runs."""
    lines = [_chat(name, number) for number in range(rng.randint(2, 50))]
    lines[rng.randrange(len(lines))] = {"custom_id": f"{name}-x", "method": "GET", "url": CHAT}
    return Order(kind="faulty", lines=tuple(lines), statuses=("failed",))


def poison(rng: random.Random, name: str) -> Order:
    """A line that ends or hangs every engine: it alone is given up, its neighbours are answered."""
    count, worst = (24, {"crash": True}) if rng.random() < 0.7 else (6, {"hang": "engine"})
    lines = [_slow(name, number, rng.randint(20, 200)) for number in range(count)]
    at = rng.randrange(count)
    lines[at] = _chat(name, at, x_simulate=worst)
    return Order(kind="poison", lines=tuple(lines), deaths=math.ceil(math.log2(count)) + 3)


def deadly(rng: random.Random, name: str) -> Order:
    """A line that ends the engine the first time that it is tried."""
    lines = [_slow(name, number, rng.randint(50, 300)) for number in range(rng.randint(40, 120))]
    at = rng.randrange(len(lines))
    lines[at] = _chat(name, at, x_simulate={"crash": 1, "delay_ms": 50})
    return Order(kind="deadly", lines=tuple(lines), deaths=1)


OTHERS: Final = (mixed, embeddings, completions, cancelled, expiring, faulty, mixed, cancelled)
"""What runs beside the steady ones, each as often as it stands here."""


def _chat(name: str, number: int, **fields: Any) -> Json:
    return chat(f"{name}-{number}", f"{name} line {number}", **fields)


def _slow(name: str, number: int, delay_ms: int) -> Json:
    return _chat(name, number, x_simulate={"delay_ms": delay_ms})


# --- what each line must give ---------------------------------------------------------------------


def check_line(order: Order, line: Json, result: Json, status: str) -> None:
    """Hold a line's result against what the line must give.

    Args:
        order: its batch.
        line: as it was sent.
        result: as it stands in one of the two files.
        status: how the batch ended.

    Raises:
        AssertionError: it is another line's answer, or none that this line can give.
    """
    where = f"{order.kind} {line['custom_id']}: {str(result)[:500]}"
    if result["response"] is None:
        code = result["error"]["code"]
        if code == UNSTARTED.get(status):
            return
        assert code == _given_up_as(line), where
        return
    code = result["response"]["status_code"]
    wanted = _status_of(line)
    assert code == wanted, f"{wanted} wanted; {where}"
    assert _given_up_as(line) is None, where
    if code == 200:
        assert _content(order, result["response"]["body"]) == _wanted(order, line), where


def _given_up_as(line: Json) -> str | None:
    """Return the code of a line that never answers; None for all others."""
    simulated = _simulated(line)
    if simulated.get("hang") is True:
        return "request_timeout"
    if simulated.get("hang") == "engine" or simulated.get("crash") is True:
        return "engine_failure"
    return None


def _simulated(line: Json) -> Json:
    found: Json = line["body"].get("x_simulate") or {}
    return found


def _status_of(line: Json) -> int:
    simulated = _simulated(line)
    if line["body"].get("max_tokens") == 0:
        return 400
    # A status for the first times only is asked again for until it is over.
    return int(simulated["status"]) if "status" in simulated and "times" not in simulated else 200


def _content(order: Order, body: Json) -> Any:
    if order.endpoint == EMBEDDINGS:
        return body["data"][0]["embedding"]
    if order.endpoint == COMPLETIONS:
        return body["choices"][0]["text"]
    return body["choices"][0]["message"]["content"]


def _wanted(order: Order, line: Json) -> Any:
    if order.endpoint == EMBEDDINGS:
        return vector(line["body"]["input"], 8)
    if order.endpoint == COMPLETIONS:
        return answer_to(line["body"]["prompt"])
    content = answer_to(text_of(line))
    size = _simulated(line).get("output_bytes")
    return content if size is None else content[:size].ljust(size, "x")
