"""Commands on projects: what they keep, and how much they may."""

import re
from pathlib import Path
from typing import Final

import click

from protos.nightshift.v1 import admin_pb2
from services.cli.shared import admin_calls
from services.cli.shared.reach_store import ask, store_options
from services.cli.shared.table import local_time, print_object, print_table

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE: Final = re.compile(r"(\d{1,18})\s?([KMGT]?)(?:i?B)?", re.IGNORECASE)


def _size(_ctx: click.Context, _param: click.Parameter, text: str) -> int | None:
    """Return `500G` or such as bytes, `none` as 0, and `default` as None."""
    if text.lower() in ("none", "default"):
        return 0 if text.lower() == "none" else None
    found = _SIZE.fullmatch(text)
    size = int(found[1]) * _UNITS[found[2].upper()] if found else 0
    if not 0 < size < 1 << 63:
        raise click.BadParameter(f"{text!r} is no size such as 500G; 'none' is no limit")
    return size


@click.group()
def projects() -> None:
    """List projects with what they keep, and set how much each may.

    A project is made with its first key (`nightshift keys create`).
    """


@projects.command(name="list")
@click.option("--project", default="", help="Only this one.")
@click.option("--json", "as_json", is_flag=True, help="For programs: JSON lines.")
@store_options
def list_projects(*, project: str, as_json: bool, data: Path, store: str | None) -> None:
    """List projects by name, with the bytes that their files have and may have."""
    found = ask(data, store, lambda there: admin_calls.list_projects(there, project))
    if as_json:
        for each in found:
            print_object(_object(each))
        return
    print_table([("PROJECT", "CREATED", "USED BYTES", "MAY HAVE", "SET BY"), *map(_row, found)])


@projects.command(name="set-quota")
@click.argument("project")
@click.argument("size", callback=_size)
@store_options
def set_quota(*, project: str, size: int | None, data: Path, store: str | None) -> None:
    """Set the most bytes that the files of PROJECT may have together.

    SIZE is such as 500G; `none` for no limit, `default` for what the store's setting
    NIGHTSHIFT_STORE_PROJECT_QUOTA_BYTES says. What is stored already stays, whatever its size, and
    end files of batches are never refused.
    """
    changed = ask(data, store, lambda there: admin_calls.set_quota(there, project, size))
    limit = f"{changed.limit_bytes} bytes" if changed.HasField("limit_bytes") else "no limit"
    print(f"{changed.id}: {limit}, {changed.used_bytes} used")


def _row(project: admin_pb2.Project) -> tuple[str, ...]:
    return (
        project.id,
        local_time(project.created_at),
        str(project.used_bytes),
        str(project.limit_bytes) if project.HasField("limit_bytes") else "no limit",
        "its own" if project.HasField("quota_bytes") else "default",
    )


def _object(project: admin_pb2.Project) -> dict[str, object]:
    return {
        "id": project.id,
        "created_at": project.created_at,
        "used_bytes": project.used_bytes,
        "quota_bytes": project.quota_bytes if project.HasField("quota_bytes") else None,
        "limit_bytes": project.limit_bytes if project.HasField("limit_bytes") else None,
    }
