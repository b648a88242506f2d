"""After a round: every invariant, looked at from outside through the API and the engines' notes."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import openai
from openai import AsyncOpenAI
from openai.types import Batch, FileObject

from services.executor.presence.room import room_of
from tests.chaos.ledger import Client, Entry, Ledger, Violation
from tests.chaos.workload import check_line
from tests.kit.batches import Outcome, ids, jsonl, outcome
from tests.kit.started_lines import Started, executions

PAGE: Final = 100
SEATS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a round came to.

    Attributes:
        batches: batches checked.
        lines: lines checked.
        executed: lines that some engine started.
        twice: of those, the ones that were started anew.
        again: how often lines were started anew, in all.
    """

    batches: int
    lines: int
    executed: int
    twice: int
    again: int

    def __str__(self) -> str:
        """Return it in one line."""
        return (
            f"{self.lines} lines of {self.batches} batches checked; {self.twice} of "
            f"{self.executed} executed ones were so more than once, {self.again} times in all"
        )


async def verify(
    client: Client, ledger: Ledger, started: Sequence[Started], hits: Mapping[str, int]
) -> Account:
    """Check all that was acknowledged, and what is listed.

    Args:
        client: asks, as it did before.
        ledger: what was acknowledged.
        started: what engines noted.
        hits: how often each executor was hit, by its name.

    Raises:
        Violation, AssertionError: something is lost, twice, or not as it must be.
    """
    batches = await _all(client, lambda api, after: api.batches.list(limit=PAGE, after=after))
    files = await _all(client, lambda api, after: api.files.list(limit=PAGE, after=after))
    by_id = _once("batch", batches)
    _once("file", files)
    _check_keys(ledger, batches)
    lines = 0
    checked: list[Batch] = []
    for entry in ledger.entries:
        if entry.file_id:
            await _check_input(client, entry)
        if entry.batch_id:
            checked.append(await _check_entry(client, entry, by_id[entry.batch_id]))
            lines += len(entry.order.lines)
    _check_listed(batches, files, {entry.deleted for entry in ledger.entries})
    deaths = sum(entry.order.deaths for entry in ledger.entries)
    check_repeated(started, hits, deaths)
    counted = executions(started)
    return Account(
        batches=len(checked),
        lines=lines,
        executed=len(counted),
        twice=sum(count > 1 for count in counted.values()),
        again=sum(count - 1 for count in counted.values()),
    )


async def _all(client: Client, page: Callable[..., Any]) -> list[Any]:
    found: list[Any] = []
    while True:
        after = found[-1].id if found else openai.omit

        async def one(api: AsyncOpenAI, after: Any = after) -> Any:
            return await page(api, after)

        data = (await client.insist(one)).data
        found += data
        if len(data) < PAGE:
            return found


def _once(what: str, listed: Iterable[Any]) -> dict[str, Any]:
    counted = Counter(each.id for each in listed)
    twice = [each for each, count in counted.items() if count > 1]
    if twice:
        raise Violation(f"listed twice: {what} {twice}")
    return {each.id: each for each in listed}


def _check_keys(ledger: Ledger, batches: Sequence[Batch]) -> None:
    """Nothing acknowledged is missing, nothing stands there twice under one key."""
    listed: dict[str, list[str]] = {}
    for batch in batches:
        listed.setdefault((batch.metadata or {}).get("key", ""), []).append(batch.id)
    for entry in ledger.entries:
        found = listed.pop(entry.key, [])
        if entry.batch_id and found != [entry.batch_id]:
            raise Violation(f"{entry.key} was acknowledged as {entry.batch_id}; there is {found}")
        if len(found) > entry.asked:
            raise Violation(f"{entry.key} was made {len(found)} times: {found}")
    if listed:
        raise Violation(f"batches that nobody asked for: {listed}")


async def _check_input(client: Client, entry: Entry) -> None:
    content = await client.insist(lambda api: api.files.content(entry.file_id))
    if content.content != jsonl(entry.order.lines):
        raise Violation(f"{entry.file_id} of {entry.key} is not what was uploaded")


async def _check_entry(client: Client, entry: Entry, listed: Batch) -> Batch:
    if entry.deleted:
        # It was looked at before; what is left to see is that it stays as it was.
        batch = await client.insist(lambda api: api.batches.retrieve(entry.batch_id))
    else:
        batch = await check_batch(client, entry)
    if batch.to_dict() != listed.to_dict():
        raise Violation(f"listed as {listed}, but it is {batch}")
    return batch


async def check_batch(client: Client, entry: Entry) -> Batch:
    """Hold a batch that has ended against what was asked for, line by line; return it.

    Raises:
        Violation, AssertionError: it is not as it must be.
    """
    batch = await client.insist(lambda api: api.batches.retrieve(entry.batch_id))
    _check_end(entry, batch)
    if batch.in_progress_at is None:
        _check_never_begun(batch)
        return batch
    try:
        lines = ids(entry.order.lines)
        found = await client.insist(lambda api: outcome(api, batch, lines))
        _check_lines(entry, found)
    except AssertionError as wrong:
        wrong.add_note(f"{entry.key}: {batch}")
        raise
    return batch


def _check_never_begun(batch: Batch) -> None:
    """It failed validation, or was cancelled or too late before that: no line of it is known."""
    assert batch.status in ("failed", "cancelled", "expired"), batch
    assert (batch.status == "failed") == bool(batch.errors and batch.errors.data), batch
    assert (batch.output_file_id, batch.error_file_id) == (None, None), batch
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (0, 0, 0), batch


def _check_end(entry: Entry, batch: Batch) -> None:
    statuses = set(entry.order.statuses)
    if entry.cancel_acknowledged:
        statuses = {"cancelled"}
    elif entry.order.window != "24h":
        # Who is lucky makes it in time.
        statuses |= {"completed"}
    if batch.status not in statuses:
        raise Violation(f"{entry.key} is to end {statuses}: {batch}")


def _check_lines(entry: Entry, found: Outcome) -> None:
    sent = {line["custom_id"]: line for line in entry.order.lines}
    for result in (*found.output, *found.errors):
        check_line(entry.order, sent[result["custom_id"]], result, found.batch.status)


def _check_listed(batches: Sequence[Batch], files: Sequence[FileObject], deleted: set[str]) -> None:
    """Each end file belongs to one batch that has ended, and stands in the list until deleted."""
    named = Counter(
        name
        for batch in batches
        for name in (batch.output_file_id, batch.error_file_id)
        if name is not None
    )
    listed = {file.id for file in files if file.purpose == "batch_output"}
    if listed != set(named) - deleted or any(count > 1 for count in named.values()):
        raise Violation(f"listed end files {listed}, named {named}, deleted {deleted}")


def check_repeated(started: Sequence[Started], hits: Mapping[str, int], deaths: int) -> None:
    """What an executor had begun is begun again only where it was hit, its lines in hand at most.

    Args:
        started: by time.
        hits: how often each executor was hit.
        deaths: how often lines may have ended an engine, on whichever executor.
    """
    lost: dict[str, Counter[str]] = {}
    last: dict[tuple[str, int], str] = {}
    for each in started:
        if each.retries == 0:
            before = last.get((each.batch_id, each.line))
            if before is not None:
                lost.setdefault(before, Counter())[f"{each.executor}, attempt {each.attempt}"] += 1
            last[each.batch_id, each.line] = each.executor
    high_water = _high_water(started)
    for executor, again in lost.items():
        allowed = (hits.get(executor, 0) + deaths) * high_water
        if again.total() > allowed:
            raise Violation(
                f"{again.total()} lines of {executor} were begun again, by {dict(again)}; hit were "
                f"{dict(hits)}, and {deaths} engines died, which allows for {allowed}"
            )


def _high_water(started: Sequence[Started]) -> int:
    """Return the most lines that an executor of this round may have had in hand."""
    rates = Counter((each.executor, int(each.at)) for each in started)
    fastest = max(rates.values(), default=0)
    return room_of(seats=SEATS, lines_per_second=fastest, mean_line_bytes=0).high
