"""What simulated engines started, read from the files that they keep when asked to.

`started_to(folder)` is the environment that asks; `read_started(folder)` what all executor
processes of a test noted there, dead ones included.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """One line that got a seat.

    Attributes:
        at: Unix seconds.
        executor: the executor's name.
        incarnation: of its process.
        batch_id: its batch.
        line: its ordinal in the input, from 0.
        attempt: the number that travels with it, from 1.
        retries: how often this attempt had asked the engine before and was answered 429 or such.
    """

    at: float
    executor: str
    incarnation: str
    batch_id: str
    line: int
    attempt: int
    retries: int


def started_to(folder: Path) -> dict[str, str]:
    """Return the setting that has executors note there what their engines start."""
    return {"NIGHTSHIFT_EXECUTOR_STARTED_DIR": str(folder)}


def read_started(folder: Path) -> list[Started]:
    """Read what was noted so far, by time."""
    found = []
    for file in folder.glob("*.started"):
        executor, incarnation = file.stem.rsplit(".", 1)
        # The last line may be under way; it ends with its line feed.
        for text in file.read_text().split("\n")[:-1]:
            at, batch_id, line, attempt, retries = text.split(" ")
            found.append(
                Started(
                    at=float(at),
                    executor=executor,
                    incarnation=incarnation,
                    batch_id=batch_id,
                    line=int(line),
                    attempt=int(attempt),
                    retries=int(retries),
                )
            )
    return sorted(found, key=lambda each: each.at)


def executions(started: Iterable[Started]) -> Counter[tuple[str, int]]:
    """Count how often each line, (batch id, ordinal), was begun anew; retries are no new begin."""
    return Counter((each.batch_id, each.line) for each in started if each.retries == 0)
