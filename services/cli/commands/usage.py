"""What projects have used, by key."""

from pathlib import Path

import click

from protos.nightshift.v1 import batches_pb2
from services.cli.shared import admin_calls
from services.cli.shared.reach_store import ask, store_options
from services.cli.shared.table import print_object, print_table


@click.command()
@click.option("--project", default="", help="Only this one; without it, all.")
@click.option("--json", "as_json", is_flag=True, help="For programs: JSON lines.")
@store_options
def usage(*, project: str, as_json: bool, data: Path, store: str | None) -> None:
    """Sum batches, lines and tokens by the key that created the batches."""
    found = ask(data, store, lambda there: admin_calls.list_usage(there, project))
    if as_json:
        for part in found:
            print_object(_object(part))
        return
    head = ("PROJECT", "KEY", "NAME", "BATCHES", "LINES", "DONE", "FAILED", "INPUT", "OUTPUT")
    print_table([head, *map(_row, found)])


def _object(part: batches_pb2.KeyUsage) -> dict[str, object]:
    return {
        "project": part.project_id,
        "key_id": part.key_id if part.HasField("key_id") else None,
        "key_name": part.key_name or None,
        "batches": part.batches,
        "lines": part.request_counts.total,
        "completed": part.request_counts.completed,
        "failed": part.request_counts.failed,
        "input_tokens": part.usage.input_tokens,
        "cached_tokens": part.usage.cached_tokens,
        "output_tokens": part.usage.output_tokens,
        "reasoning_tokens": part.usage.reasoning_tokens,
    }


def _row(part: batches_pb2.KeyUsage) -> tuple[str, ...]:
    counts = part.request_counts
    numbers = (
        part.batches,
        counts.total,
        counts.completed,
        counts.failed,
        part.usage.input_tokens,
        part.usage.output_tokens,
    )
    return (part.project_id, part.key_id or "none", part.key_name, *map(str, numbers))
