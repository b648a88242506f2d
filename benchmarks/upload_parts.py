"""A batch input of 1 GB assembled from parts: memory of gateway and store, and that it runs."""

import hashlib
import itertools
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from benchmarks.pipeline import LINE_BYTES
from benchmarks.processes import Meter, Usage
from benchmarks.report import Row, at_most
from benchmarks.system import Api, System, require_completed, running, simulated_lines
from benchmarks.workshop import Workshop

NAME: Final = "upload_parts"

LINES: Final = 1_000_000
PART_BYTES: Final = 64 * 1024 * 1024 - 977
"""Just under the largest part, and no multiple of a line: every cut is in the middle of one."""
AT_ONCE: Final = 4
BUDGET_MIB: Final = 200
RUN_SECONDS: Final = 1_800.0

_SIZE: Final = LINES * LINE_BYTES
_LIMITS: Final = {
    "NIGHTSHIFT_STORE_MAX_BATCH_LINES": str(LINES),
    "NIGHTSHIFT_STORE_MAX_BATCH_FILE_BYTES": str(2 * _SIZE),
}
_BOUNDARY: Final = "nightshift-benchmark"
_SEND_BYTES: Final = 1024 * 1024


def measure(workshop: Workshop) -> Iterator[Row]:
    """Send the parts out of order and several at once, complete them, and run the batch."""
    with running(("--engine", "simulated", "--executors", "2"), _LIMITS) as system:
        system.wait_serving(simulated_lines(2_000, size_bytes=LINE_BYTES), 60)
        pids = {name: pid for name, pid in system.pids().items() if name in ("gateway", "store")}
        meter = Meter(pids)
        began = time.monotonic()
        upload_id, part_ids, md5 = _send(system)
        sent = time.monotonic()
        done = system.api.post(
            f"/v1/uploads/{upload_id}/complete", {"part_ids": part_ids, "md5": md5}
        )
        completed = time.monotonic()
        usage = meter.stop()
        workshop.say(
            f"{len(part_ids)} parts in {sent - began:.1f} s, "
            f"completed in {completed - sent:.1f} s, {_peaks(usage)}"
        )
        meter_of_run = Meter(pids)
        batch = system.api.create(done["file"]["id"])
        seen = system.api.follow(batch["id"], every_seconds=0.5, within_seconds=RUN_SECONDS)
        require_completed(seen.batch)
        usage_of_run = meter_of_run.stop()
        workshop.say(f"ran in {seen.ended_at - completed:.1f} s, {_peaks(usage_of_run)}")
    others = f"others took {meter.others:.0%} of the cores"
    for one in usage:
        yield at_most(
            NAME,
            f"peak memory of the {one.name}, {_SIZE / 1e9:.2f} GB in {len(part_ids)} parts",
            one.peak_mib,
            BUDGET_MIB,
            unit="MiB",
            detail=f"{AT_ONCE} parts at once; CPU {one.cpu_seconds:.1f} s",
        )
    yield Row(
        bench=NAME,
        what="parts sent",
        value=_SIZE / (sent - began) / 1e6,
        unit="MB/s",
        detail=others,
    )
    yield Row(
        bench=NAME,
        what="completing, MD5 of all content checked",
        value=completed - sent,
        unit="s",
        detail=others,
    )
    yield from _of_run(usage_of_run, seen.ended_at - completed)


def _of_run(usage: list[Usage], seconds: float) -> Iterator[Row]:
    for one in usage:
        yield Row(
            bench=NAME,
            what=f"peak memory of the {one.name} while its {LINES:,} lines ran",
            value=one.peak_mib,
            unit="MiB",
            detail=f"{LINES / seconds:,.0f} lines/s; the index of the lines "
            f"has {24 * LINES / 1024**2:.0f} MiB",
        )


def _peaks(usage: list[Usage]) -> str:
    return ", ".join(f"{one.name} {one.peak_mib:.0f} MiB" for one in usage)


def _send(system: System) -> tuple[str, list[str], str]:
    """Send all parts; return the upload's id, the parts' in the file's order, and the MD5."""
    upload = system.api.post(
        "/v1/uploads",
        {
            "filename": "input.jsonl",
            "purpose": "batch",
            "bytes": _SIZE,
            "mime_type": "application/jsonl",
        },
    )
    starts = list(range(0, _SIZE, PART_BYTES))
    shuffled = list(starts)
    random.Random(1).shuffle(shuffled)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ids = dict(
            zip(
                shuffled,
                pool.map(lambda start: _send_part(system.up.url, upload["id"], start), shuffled),
                strict=True,
            )
        )
    md5 = hashlib.md5(usedforsecurity=False)
    for start in starts:
        md5.update(_content(start))
    return upload["id"], [ids[start] for start in starts], md5.hexdigest()


def _content(start: int) -> bytes:
    """Return the part of the file that begins at `start`."""
    end = min(start + PART_BYTES, _SIZE)
    first, last = start // LINE_BYTES, -(-end // LINE_BYTES)
    lines = simulated_lines(last - first, first=first, size_bytes=LINE_BYTES)
    return lines[start - first * LINE_BYTES : end - first * LINE_BYTES]


def _send_part(url: str, upload_id: str, start: int) -> str:
    data = _content(start)
    head = (
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="data"; filename="part"\r\n\r\n'
    ).encode()
    tail = f"\r\n--{_BOUNDARY}--\r\n".encode()
    pieces = (data[at : at + _SEND_BYTES] for at in range(0, len(data), _SEND_BYTES))
    headers = {
        "Content-Type": f"multipart/form-data; boundary={_BOUNDARY}",
        "Content-Length": str(len(head) + len(data) + len(tail)),
    }
    api = Api(url)
    try:
        answer = api.call(
            "POST",
            f"/v1/uploads/{upload_id}/parts",
            itertools.chain((head,), pieces, (tail,)),
            headers,
        )
    finally:
        api.close()
    part_id: str = json.loads(answer)["id"]
    return part_id
