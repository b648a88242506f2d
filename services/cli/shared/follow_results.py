"""Results as they finish: a stream of a batch's events, taken up again wherever it breaks off."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

import httpx2
import msgspec
import openai
from openai.types import Batch

from services.cli.shared.openai_client import REFUSED, fail
from services.cli.shared.outputs import Output
from services.cli.shared.progress import ENDED, PATIENCE_SECONDS

# The longest result that a server may be set to take, and what stands around it.
_MOST_EVENT_BYTES: Final = 1025 * 1024 * 1024
_RETRY_SECONDS: Final = 0.2


class Writer:
    """Where result lines go: what succeeded to one file, what did not to another.

    A file that is named is there under its name only once it is whole.
    """

    def __init__(self, output: Path | None, errors: Path | None) -> None:
        """Write to `output`, by default standard output, and `errors`, by default nowhere."""
        self.failed = 0
        self._stack = contextlib.ExitStack()
        self._files: list[Output] = []
        # Where somebody may be looking, and nothing can be taken back.
        self._watched: list[IO[bytes]] = [sys.stdout.buffer]
        self._output = sys.stdout.buffer if output is None else self._open(output)
        self._errors = None if errors is None else self._open(errors)

    def _open(self, path: Path) -> IO[bytes]:
        file = Output(path)
        self._files.append(file)
        try:
            opened = self._stack.enter_context(file.place.open("wb"))
        except OSError as error:
            self._discard()
            fail(f"{path} cannot be written: {error.strerror}", REFUSED)
        if not file.is_file:
            self._watched.append(opened)
        return opened

    def _discard(self) -> None:
        self._stack.close()
        for file in self._files:
            file.discard()

    def line(self, text: str) -> None:
        """Write one line, at once where somebody may be looking."""
        target = self._output
        if not _succeeded(text):
            self.failed += 1
            if self._errors is None:
                return
            target = self._errors
        target.write(text.encode() + b"\n")
        if target in self._watched:
            target.flush()

    def start_over(self) -> None:
        """Take back what can be taken back: all lines follow again."""
        self.failed = 0
        for file in (self._output, self._errors):
            if file in self._watched:
                print("nightshift: all lines follow again from here", file=sys.stderr)
            elif file is not None:
                file.seek(0)
                file.truncate()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give whole files their names, and remove the others."""
        if kind is not None:
            self._discard()
            return
        self._stack.close()
        for file in self._files:
            file.keep()


class _Response(msgspec.Struct):
    status_code: int


class _Line(msgspec.Struct):
    """What tells whether a request succeeded; a body may be long, and is read over."""

    response: _Response | None


def _succeeded(line: str) -> bool:
    response = msgspec.json.decode(line, type=_Line).response
    return response is not None and 200 <= response.status_code < 300


def write_as_they_finish(client: openai.OpenAI, batch_id: str, writer: Writer) -> Batch:
    """Write each result line once, as it finishes; returns the batch as it ended.

    Raises:
        openai.OpenAIError: the batch is unknown, or the server stays away for 30 s.
    """
    batch: Batch | None = None
    for event in _events(client, batch_id):
        match event.event:
            case "results":
                writer.line(event.data)
            case "reset":
                writer.start_over()
            case "state":
                batch = Batch.construct(**json.loads(event.data))
            case _:
                pass  # of a later server
    assert batch is not None  # the last event is a state
    return batch


def _events(client: openai.OpenAI, batch_id: str) -> Iterator[httpx2.ServerSentEvent]:
    """Yield events to the last one, over as many connections as it takes."""
    after = ""
    answered: float | None = None
    while True:
        try:
            with _connect(client, batch_id, after) as events:
                answered = time.monotonic()
                for event in events:
                    yield event
                    after = event.id
                    if event.event == "state" and json.loads(event.data)["status"] in ENDED:
                        return
                answered = time.monotonic()
        except httpx2.TransportError:
            answered = time.monotonic()
        except (openai.APIConnectionError, openai.InternalServerError):
            # One that never answered is not restarting: it is not there.
            if answered is None or time.monotonic() - answered > PATIENCE_SECONDS:
                raise
        time.sleep(_RETRY_SECONDS)


@contextlib.contextmanager
def _connect(
    client: openai.OpenAI, batch_id: str, after: str
) -> Iterator[Iterator[httpx2.ServerSentEvent]]:
    stream = client.get(
        f"/batches/{batch_id}/events",
        cast_to=object,
        options={
            "params": {"include": "results"},
            "headers": {"Last-Event-ID": after} if after else {},
        },
        stream=True,
        stream_cls=openai.Stream[object],
    )
    try:
        yield iter(httpx2.EventSource(stream.response, max_event_size=_MOST_EVENT_BYTES))
    finally:
        stream.close()
