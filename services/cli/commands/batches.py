"""Commands on batches: submit, watch, list, cancel, results."""

import json
import sys
import uuid
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import click
from openai import OpenAI
from openai.types import Batch, BatchError

from services.cli.shared.openai_client import (
    INTERRUPTED,
    NOT_COMPLETED,
    REFUSED,
    errors_explained,
    fail,
    id_argument,
    open_client,
    server_options,
)
from services.cli.shared.outputs import Output
from services.cli.shared.progress import choose_display, counts_of, follow, print_json, reason_of
from services.cli.shared.table import local_time, print_table
from services.kit.wire.endpoints import ENDPOINTS

_json_option = click.option("--json", "as_json", is_flag=True, help="For programs: JSON lines.")


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--endpoint", help="Such as /v1/chat/completions.  [default: the first line's url]")
@click.option("--window", default="24h", show_default=True, help="Time in which it must be done.")
@click.option("--metadata", metavar="KEY=VALUE", multiple=True, help="Kept with the batch.")
@click.option("--watch", "follow_it", is_flag=True, help="Follow it to its end.")
@_json_option
@server_options
def submit(
    *,
    file: Path,
    endpoint: str | None,
    window: str,
    metadata: tuple[str, ...],
    follow_it: bool,
    as_json: bool,
    base_url: str,
    api_key: str,
) -> None:
    """Upload FILE, a JSONL file of requests, and run it as a batch.

    Prints the batch's id. Exit status with --watch: 0 completed, 3 ended otherwise.
    """
    if not file.is_file():
        # A pipe is read once, and an upload may have to be sent again.
        raise click.UsageError(f"{file} is no file: write the requests to one first")
    pairs = dict(_pair(text) for text in metadata)
    endpoint = endpoint or _first_url(file)
    client = open_client(base_url, api_key)
    with errors_explained(base_url):
        with file.open("rb") as content:
            uploaded = client.files.create(file=content, purpose="batch", extra_headers=_once())
        batch = client.batches.create(
            extra_headers=_once(),
            input_file_id=uploaded.id,
            # Which endpoints and windows there are is the server's to say.
            endpoint=cast(Any, endpoint),
            completion_window=cast(Literal["24h"], window),
            metadata=pairs or None,
        )
        if follow_it:
            _follow(client, batch.id, as_json=as_json)
        elif as_json:
            print_json(batch)
        else:
            print(batch.id, flush=True)
            print(f"follow it with: nightshift watch {batch.id}", file=sys.stderr)


def _once() -> dict[str, str]:
    """Return headers for a request that makes one thing, though the client may send it twice.

    It does where an answer was lost, and all lines of a second batch would run again.
    """
    return {"Idempotency-Key": f"submit-{uuid.uuid4()}"}


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise click.BadParameter(f"takes KEY=VALUE, not {text!r}", param_hint="--metadata")
    return key, value


def _first_url(file: Path) -> str:
    """Return the url of a file's first request.

    Raises:
        click.UsageError: it cannot be told.
    """
    with file.open("rb") as content:
        line = next((line for line in content if line.strip()), b"")
    try:
        url = json.loads(line.removeprefix(b"\xef\xbb\xbf"))["url"]
    except (ValueError, KeyError, TypeError):
        url = None
    if not isinstance(url, str):
        raise click.UsageError(
            f"the first line of {file.name} names no url; say which endpoint the requests are "
            f"for with --endpoint, one of {', '.join(ENDPOINTS)}"
        )
    return url


@click.command()
@id_argument("batch_id")
@_json_option
@server_options
def watch(*, batch_id: str, as_json: bool, base_url: str, api_key: str) -> None:
    """Follow a batch to its end.

    A bar on a terminal, plain lines elsewhere. Exit status: 0 completed, 3 ended otherwise.
    """
    client = open_client(base_url, api_key)
    with errors_explained(base_url):
        _follow(client, batch_id, as_json=as_json)


def _follow(client: OpenAI, batch_id: str, *, as_json: bool) -> None:
    """Follow a batch; ends the command where it did not complete."""
    try:
        batch = follow(client, batch_id, choose_display(as_json=as_json))
    except KeyboardInterrupt:
        fail(f"{batch_id} goes on; follow it again with: nightshift watch {batch_id}", INTERRUPTED)
    if not as_json:
        _say_end(batch)
    if batch.status != "completed":
        sys.exit(NOT_COMPLETED)


def _say_end(batch: Batch) -> None:
    for error in (batch.errors.data if batch.errors else None) or []:
        _say_error(error)
    if batch.output_file_id or batch.error_file_id:
        failed = " --errors FILE" if batch.error_file_id else ""
        print(f"results with: nightshift results {batch.id}{failed}", file=sys.stderr)


def _say_error(error: BatchError) -> None:
    where = f"line {error.line}: " if error.line is not None else ""
    print(f"  {where}{error.message} ({error.code})", file=sys.stderr)


@click.command(name="list")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True)
@_json_option
@server_options
def list_batches(*, limit: int, as_json: bool, base_url: str, api_key: str) -> None:
    """List batches, newest first."""
    client = open_client(base_url, api_key)
    with errors_explained(base_url):
        batches = []
        for batch in client.batches.list(limit=min(limit, 100)):
            batches.append(batch)
            if len(batches) == limit:
                break
    if as_json:
        for batch in batches:
            print_json(batch)
        return
    head = ("ID", "STATUS", "DONE", "FAILED", "LINES", "CREATED", "WAITING FOR")
    rows = [head, *map(_row, batches)]
    print_table(rows)


def _row(batch: Batch) -> tuple[str, ...]:
    done, failed, total = counts_of(batch)
    return (
        batch.id,
        batch.status,
        str(done),
        str(failed),
        str(total),
        local_time(batch.created_at),
        reason_of(batch),
    )


@click.command()
@id_argument("batch_id")
@_json_option
@server_options
def cancel(*, batch_id: str, as_json: bool, base_url: str, api_key: str) -> None:
    """Cancel a batch; what is finished is kept."""
    client = open_client(base_url, api_key)
    with errors_explained(base_url):
        batch = client.batches.cancel(batch_id)
    if as_json:
        print_json(batch)
    else:
        print(f"{batch.id} {batch.status}")


@click.command()
@id_argument("batch_id")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the results there.  [default: standard output]",
)
@click.option(
    "--errors",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the lines that failed there.",
)
@click.option("--follow", "follow_it", is_flag=True, help="Write lines as they finish.")
@_json_option
@server_options
def results(
    *,
    batch_id: str,
    output: Path | None,
    errors: Path | None,
    follow_it: bool,
    as_json: bool,
    base_url: str,
    api_key: str,
) -> None:
    """Download a batch's results (--output) and the lines that failed (--errors).

    A file that is named is written whole or not at all; one without lines is written empty.
    With --json and files named, the batch object is printed. With --follow, lines come as they
    finish, and the command ends with the batch: exit status 0 completed, 3 ended otherwise.
    """
    _refuse_one_file(output, errors)
    client = open_client(base_url, api_key)
    if follow_it:
        with errors_explained(base_url):
            batch = _follow_results(client, batch_id, output, errors)
        if as_json and (output or errors):
            print_json(batch)
        if batch.status != "completed":
            sys.exit(NOT_COMPLETED)
        return
    with errors_explained(base_url):
        batch = client.batches.retrieve(batch_id)
        if not batch.output_file_id and not batch.error_file_id:
            fail(f"{batch_id} is {batch.status} and has no results", REFUSED)
        if errors is not None:
            _save(client, batch.error_file_id, errors)
        if output is not None:
            _save(client, batch.output_file_id, output)
        elif errors is None:
            _print_content(client, batch.output_file_id)
    if as_json and (output or errors):
        print_json(batch)
    elif batch.error_file_id and errors is None:
        _, failed, _ = counts_of(batch)
        print(f"{failed} line(s) failed; get them with --errors FILE", file=sys.stderr)


def _refuse_one_file(output: Path | None, errors: Path | None) -> None:
    if output is not None and errors is not None and output.resolve() == errors.resolve():
        raise click.UsageError("--output and --errors name the same file; each needs its own")


def _follow_results(
    client: OpenAI, batch_id: str, output: Path | None, errors: Path | None
) -> Batch:
    # Late: no other command needs what reads a stream.
    from services.cli.shared.follow_results import Writer, write_as_they_finish

    try:
        with Writer(output, errors) as writer:
            batch = write_as_they_finish(client, batch_id, writer)
    except BrokenPipeError:
        _stop_quietly()
    except KeyboardInterrupt:
        fail(f"{batch_id} goes on", INTERRUPTED)
    for error in (batch.errors.data if batch.errors else None) or []:
        _say_error(error)
    if writer.failed and errors is None:
        print(f"{writer.failed} line(s) failed; get them with --errors FILE", file=sys.stderr)
    return batch


def _stop_quietly() -> NoReturn:
    """End as whoever reads our output has had enough, as `head` has."""
    sys.stderr.close()
    sys.exit(0)


def _save(client: OpenAI, file_id: str | None, path: Path) -> None:
    output = Output(path)
    try:
        with output.place.open("wb") as file:
            for part in _content(client, file_id):
                file.write(part)
        output.keep()
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}", REFUSED)
    finally:
        output.discard()


def _print_content(client: OpenAI, file_id: str | None) -> None:
    try:
        for part in _content(client, file_id):
            sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        _stop_quietly()


def _content(client: OpenAI, file_id: str | None) -> Any:
    """Yield a file's bytes as they arrive; none where there is no file."""
    if file_id is None:
        return
    with client.files.with_streaming_response.content(file_id) as response:
        yield from response.iter_bytes(1024 * 1024)
