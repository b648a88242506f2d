"""Events as server-sent events (WHATWG HTML, section 9.2), each with the id to go on after."""

from collections.abc import Callable
from typing import Any, Final

import orjson

from protos.nightshift.v1 import batches_pb2, events_pb2

OPENING: Final = b": one event for each state and each finished line\nretry: 1000\n"
"""Sent before any event. Without an empty line at its end, which would make an event of it."""

_HEARTBEAT: Final = b":\n"
_RESULT: Final = b"event: results\ndata: "


class SseWriter:
    """Turns pages into text; remembers only whether it is in the middle of a line."""

    def __init__(self, batch_object: Callable[[batches_pb2.Batch], dict[str, Any]]) -> None:
        """Show batches as `batch_object` does."""
        self._batch_object = batch_object
        self._open = False

    def text(self, page: events_pb2.ReadBatchEventsResponse) -> bytes:
        """Return the text of a page; of one without events a comment."""
        if not page.events:
            # Inside a line there is no place for a comment.
            return b"" if self._open else _HEARTBEAT
        return b"".join(map(self._event, page.events))

    def _event(self, event: events_pb2.WatchBatchResponse) -> bytes:
        match event.WhichOneof("event"):
            case "results":
                return self._results(event.results)
            case "state":
                shown = self._batch_object(event.state.batch)
                return _whole("state", event.state.event_id, shown)
            case "reset":
                message = (
                    "The events after the one you had are known no more; all lines follow again."
                )
                return _whole("reset", event.reset.event_id, {"message": message})
            case _:
                return b""

    def _results(self, results: events_pb2.ResultLinesEvent) -> bytes:
        *lines, rest = results.lines.split(b"\n")
        pieces = []
        for line, event_id in zip(lines, results.event_ids, strict=True):
            start = b"" if self._open else _RESULT
            self._open = False
            pieces.append(b"%b%b\nid: %b\n\n" % (start, line, event_id.encode()))
        if rest:
            pieces.append(rest if self._open else _RESULT + rest)
            self._open = True
        return b"".join(pieces)


def _whole(name: str, event_id: str, data: Any) -> bytes:
    return b"event: %b\nid: %b\ndata: %b\n\n" % (
        name.encode(),
        event_id.encode(),
        orjson.dumps(data),
    )
