"""How progress is shown: a bar on a terminal, plain lines elsewhere, JSON for programs."""

import json
import sys
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, Self

import openai
from openai.types import Batch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})

_RATE_SECONDS: Final = 15.0
_LEAST_RATE_SECONDS: Final = 0.5
_LINE_SECONDS: Final = 2.0
# Quick at first, so that a small batch is not waited for; then kind to the server.
_QUICK_POLL_SECONDS: Final = 0.1
_POLL_SECONDS: Final = 0.5
_QUICK_FOR_SECONDS: Final = 5.0
# A server that restarts is waited for.
PATIENCE_SECONDS: Final = 30.0


class Display(AbstractContextManager["Display"]):
    """Shows a batch whenever it is read; entered before the first time, left after the last."""

    @abstractmethod
    def show(self, batch: Batch) -> None:
        """Show its state now."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the terminal as it was."""


def follow(client: openai.OpenAI, batch_id: str, display: Display) -> Batch:
    """Show a batch until it has ended; returns it as it ended.

    Raises:
        openai.OpenAIError: it is unknown, or the server stays away for 30 s.
    """
    began = time.monotonic()
    answered: float | None = None
    with display:
        while True:
            try:
                batch = client.batches.retrieve(batch_id)
            except (openai.APIConnectionError, openai.InternalServerError):
                # One that never answered is not restarting: it is not there.
                if answered is None or time.monotonic() - answered > PATIENCE_SECONDS:
                    raise
            else:
                answered = time.monotonic()
                display.show(batch)
                if batch.status in ENDED:
                    return batch
            quick = time.monotonic() - began < _QUICK_FOR_SECONDS
            time.sleep(_QUICK_POLL_SECONDS if quick else _POLL_SECONDS)


class Rate:
    """Lines a second over the last while."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Count by `clock`, in seconds."""
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, finished: int) -> None:
        """Take note that `finished` lines have ended by now."""
        now = self._clock()
        self._seen.append((now, finished))
        # One older reading stays, or a slow batch would never have two.
        while len(self._seen) > 2 and now - self._seen[1][0] > _RATE_SECONDS:
            self._seen.popleft()

    def lines_per_second(self) -> float | None:
        """Return the rate; None until there is one."""
        if len(self._seen) < 2:
            return None
        (first, before), (last, after) = self._seen[0], self._seen[-1]
        if last - first < _LEAST_RATE_SECONDS or after == before:
            return None
        return (after - before) / (last - first)


def counts_of(batch: Batch) -> tuple[int, int, int]:
    """Return lines done, failed and in all; all zero until they are known."""
    counts = batch.request_counts
    return (counts.completed, counts.failed, counts.total) if counts else (0, 0, 0)


def reason_of(batch: Batch) -> str:
    """Return why a batch waits; empty when it does not, or the server does not say."""
    said: Any = getattr(batch, "nightshift", None)
    return str(said.get("reason") or "") if isinstance(said, dict) else ""


class _Rated(Display):
    """Common to the displays for people: the rate and the time left."""

    def __init__(self) -> None:
        self.rate = Rate()

    def describe(self, batch: Batch) -> str:
        """Return `16 lines/s, 12 s left` as far as it is known, else why it waits."""
        done, failed, total = counts_of(batch)
        self.rate.add(done + failed)
        rate = self.rate.lines_per_second()
        if batch.status in ENDED:
            return ""
        if rate is None:
            return reason_of(batch)
        return f"{rate:,.1f} lines/s, {spoken_seconds((total - done - failed) / rate)} left"


def spoken_seconds(seconds: float) -> str:
    """Return `12 s`, `3 min 20 s` or `5 h 12 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3_600} h {whole % 3_600 // 60} min"


class Bar(_Rated):
    """A progress bar on a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        """Draw on `console`, standard output by default."""
        super().__init__()
        self._progress = Progress(
            TextColumn("{task.fields[status]}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f}/{task.fields[lines]} lines"),
            TextColumn("{task.fields[failed]} failed"),
            TextColumn("{task.fields[speed]}"),
            console=console,
        )
        self._task: TaskID | None = None

    def show(self, batch: Batch) -> None:
        """Draw it anew."""
        done, failed, total = counts_of(batch)
        fields: dict[str, Any] = {
            "status": batch.status,
            "lines": f"{total:,}" if total else "?",
            "failed": f"{failed:,}",
            "speed": self.describe(batch),
        }
        if self._task is None:
            self._task = self._progress.add_task("", total=None, **fields)
        self._progress.update(self._task, completed=done + failed, total=total or None, **fields)

    def __enter__(self) -> Self:
        """Begin to draw."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the last state standing."""
        self._progress.stop()


class Lines(_Rated):
    """A line when the status changes, and every two seconds while lines end."""

    def __init__(self) -> None:
        """Say nothing yet."""
        super().__init__()
        self._last: tuple[str, str, int, int, int] | None = None
        self._said_at = 0.0

    def show(self, batch: Batch) -> None:
        """Print a line where there is news."""
        done, failed, total = counts_of(batch)
        speed = self.describe(batch)
        reason = reason_of(batch) if batch.status not in ENDED else ""
        state = (batch.status, reason, done, failed, total)
        now = time.monotonic()
        same_status = self._last is not None and self._last[:2] == state[:2]
        if state == self._last or (same_status and now - self._said_at < _LINE_SECONDS):
            return
        self._last, self._said_at = state, now
        known = f": {done + failed}/{total} lines, {failed} failed" if total else ""
        print(f"{batch.id} {batch.status}{known}{', ' + speed if speed else ''}", flush=True)


class Json(Display):
    """The batch object as a JSON line whenever its status or counts change."""

    def __init__(self) -> None:
        """Say nothing yet."""
        self._last: tuple[str, tuple[int, int, int]] | None = None

    def show(self, batch: Batch) -> None:
        """Print it where it changed."""
        state = (batch.status, counts_of(batch))
        if state != self._last:
            self._last = state
            print_json(batch)


def print_json(item: openai.BaseModel) -> None:
    """Print an API object as one line of JSON."""
    print(json.dumps(item.to_dict(mode="json")), flush=True)


def choose_display(*, as_json: bool) -> Display:
    """Return the display that fits where standard output goes."""
    if as_json:
        return Json()
    return Bar() if sys.stdout.isatty() else Lines()
