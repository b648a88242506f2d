"""A reader of a batch's events, which asks page by page."""

from dataclasses import dataclass, field

import orjson

from protos.nightshift.v1 import batches_pb2, events_pb2
from tests.integration.store_work.harness import Store
from tests.kit.store import our_errors


@dataclass
class Stream:
    """One reader of a batch's events, which asks page by page."""

    store: Store
    batch_id: str
    results: bool = True
    after: str = ""
    ended: bool = False
    resets: int = 0
    #: Each whole line, with the id behind it.
    lines: list[tuple[str, bytes]] = field(default_factory=list)
    states: list[tuple[str, batches_pb2.Batch]] = field(default_factory=list)
    largest: int = 0
    _open: bytes = b""

    async def ask(self, wait_ms: int = 0) -> events_pb2.ReadBatchEventsResponse:
        """Ask for the next page and take it in."""
        watch = events_pb2.WatchBatchRequest(
            batch_id=self.batch_id, include_results=self.results, after=self.after
        )
        request = events_pb2.ReadBatchEventsRequest(watch=watch, wait_ms=wait_ms)
        with our_errors():
            page = await self.store.events.ReadBatchEvents(request, metadata=self.store.metadata)
        for event in page.events:
            match event.WhichOneof("event"):
                case "reset":
                    self.resets += 1
                case "results":
                    self._take(event.results)
                case "state":
                    assert not self._open
                    self.states.append((event.state.event_id, event.state.batch))
                case _:
                    raise AssertionError(event)
        self.after, self.ended = page.next, page.ended
        return page

    def _take(self, results: events_pb2.ResultLinesEvent) -> None:
        self.largest = max(self.largest, len(results.lines))
        *whole, rest = (self._open + results.lines).split(b"\n")
        assert len(whole) == len(results.event_ids)
        self.lines += zip(results.event_ids, whole, strict=True)
        self._open = rest

    async def drain(self) -> "Stream":
        """Ask until nothing more is to be told now."""
        while not self.ended and (await self.ask()).events:
            pass
        return self

    def told(self) -> list[str]:
        """The custom ids of the lines, in order."""
        return [orjson.loads(line)["custom_id"] for _, line in self.lines]

    def status(self) -> int:
        """The last state."""
        return self.states[-1][1].status


async def started(store: Store, lines: int) -> tuple[str, str]:
    """Return a running batch and the token of an attempt on all its lines."""
    batch_id = await store.batch(lines)
    (dispatch,) = await store.cut((batch_id, lines))
    return batch_id, (await store.open(dispatch)).token


def ids(*numbers: int) -> list[str]:
    return [f"r{number}" for number in numbers]
