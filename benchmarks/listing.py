"""Paging through 100,000 batches of one project: whether the last page costs what the first does.

The batches are rows put into the database of a stopped system; making them over REST would take
an hour. They are copies of one that ran.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import sqlalchemy as sa

from benchmarks.processes import Meter, Usage, resident_mib
from benchmarks.report import Row, at_most, percentile
from benchmarks.system import Api, Refused, fresh_folder, running_on, simulated_lines
from benchmarks.workshop import Workshop
from services.kit.wire.ids import uuid7_hex
from services.store.settings import StoreSettings
from services.store.tables.core import batches, counters

NAME: Final = "listing"

BATCHES: Final = 100_000
PAGE: Final = 100
ENDS: Final = 20
"""How many pages are compared at the start, in the middle and at the end."""
ROUNDS: Final = 3
BUDGET: Final = 1.5

_AT_ONCE: Final = 5_000
_WALK_SECONDS: Final = 60.0


def measure(workshop: Workshop) -> Iterator[Row]:
    """Read all pages once, then those that are compared again in turn."""
    with fresh_folder() as folder:
        data = folder / "data"
        with running_on(data) as system:
            system.wait_serving(simulated_lines(1), 60)
        began = time.monotonic()
        _fill(data)
        workshop.say(f"{BATCHES:,} batches put in, {time.monotonic() - began:.1f} s")
        with running_on(data) as system:
            pids = system.pids()
            # What is done once only is not to count for the first pages.
            for _ in range(ENDS):
                _read(system.api, "")
            before = resident_mib(pids["store"])
            meter = Meter(pids)
            cursors, times = _walk(system.api)
            usage = {one.name: one for one in meter.stop()}
            after = resident_mib(pids["store"])
            again = _read_in_turn(system.api, cursors)
    first, middle, last = (percentile(times[part], 50) for part in _parts(len(times)))
    workshop.say(
        f"{len(times):,} pages in {sum(times) / 1e3:.1f} s; p50 of the first {ENDS} "
        f"{first:.1f} ms, middle {middle:.1f} ms, last {last:.1f} ms"
    )
    yield at_most(
        NAME,
        f"time of the last {ENDS} pages ÷ the first {ENDS}, p50, {BATCHES:,} batches",
        last / first,
        BUDGET,
        detail=f"the middle ÷ the first {middle / first:.2f}; each part {ROUNDS} times more, in "
        f"turn: {again[2] / again[0]:.2f}, the middle {again[1] / again[0]:.2f}; "
        f"others took {meter.others:.0%} of the cores",
    )
    yield Row(
        bench=NAME,
        what=f"a page of {PAGE}, p50 of all {len(times):,}",
        value=percentile(times, 50),
        unit="ms",
        detail=f"first {ENDS} {first:.1f}, middle {ENDS} {middle:.1f}, last {ENDS} {last:.1f}; "
        f"p99 {percentile(times, 99):.1f}, worst {max(times):.1f}; CPU ms a page: "
        + ", ".join(
            f"{name} {usage[name].cpu_seconds / len(times) * 1e3:.1f}"
            for name in ("gateway", "store")
        ),
    )
    yield _memory(usage, before, after)


def _memory(usage: Mapping[str, Usage], before: float, after: float) -> Row:
    return Row(
        bench=NAME,
        what="peak memory of the store while all pages were read",
        value=usage["store"].peak_mib,
        unit="MiB",
        detail=f"resident {before:.0f} before, {after:.0f} after; "
        f"gateway's peak {usage['gateway'].peak_mib:.0f}",
    )


def _fill(data: Path) -> None:
    """Copy the one batch that ran until the project has `BATCHES`."""
    engine = sa.create_engine(StoreSettings(data_dir=data).sqlalchemy_url)
    with engine.begin() as connection:
        ran = connection.execute(sa.select(batches)).one()
        # A None for a JSON column would be stored as JSON's null.
        row = {name: value for name, value in ran._asdict().items() if value is not None}
        # As it is some time after its end: the store is not to clear 100,000 batches meanwhile.
        row["cleared_ms"] = row["sealed_ms"]
        counter = counters.c.name == "seq"
        seq: int = connection.execute(sa.select(counters.c.n).where(counter)).scalar_one()
        last = seq + BATCHES - 1
        for start in range(seq + 1, last + 1, _AT_ONCE):
            numbers = range(start, min(start + _AT_ONCE, last + 1))
            connection.execute(
                batches.insert(),
                [{**row, "id": f"batch_{uuid7_hex()}", "seq": number} for number in numbers],
            )
        connection.execute(counters.update().where(counter).values(n=last))
    engine.dispose()


def _walk(api: Api) -> tuple[list[str], list[float]]:
    """Read page after page; return what each came after, and how many ms each took.

    Raises:
        Refused: the pages do not have every batch once, or the walk takes too long.
    """
    deadline = time.monotonic() + _WALK_SECONDS
    cursors, times = [""], []
    seen: set[str] = set()
    while True:
        answer, took = _read(api, cursors[-1])
        times.append(took)
        page = json.loads(answer)
        seen.update(one["id"] for one in page["data"])
        if not page["has_more"]:
            break
        cursors.append(page["last_id"])
        if time.monotonic() > deadline:
            raise Refused(f"{len(times)} pages took {_WALK_SECONDS:.0f} s")
    if len(seen) != BATCHES or len(times) != BATCHES // PAGE:
        raise Refused(f"{len(seen)} batches on {len(times)} pages")
    return cursors, times


def _read_in_turn(api: Api, cursors: Sequence[str]) -> list[float]:
    """Return the p50 of the first, the middle and the last pages, in ms.

    A machine that others use may have another speed when the walk ends than when it began.
    """
    parts = _parts(len(cursors))
    times: list[list[float]] = [[] for _ in parts]
    for _ in range(ROUNDS):
        for part, taken in zip(parts, times, strict=True):
            taken.extend(_read(api, after)[1] for after in cursors[part])
    return [percentile(taken, 50) for taken in times]


def _parts(pages: int) -> tuple[slice, slice, slice]:
    middle = (pages - ENDS) // 2
    return slice(0, ENDS), slice(middle, middle + ENDS), slice(pages - ENDS, pages)


def _read(api: Api, after: str) -> tuple[bytes, float]:
    """Return one page as it came, and how many ms it took."""
    began = time.monotonic()
    answer = api.call("GET", f"/v1/batches?limit={PAGE}" + (f"&after={after}" if after else ""))
    return answer, (time.monotonic() - began) * 1e3
