"""Commands on API keys: make one, list them, end one."""

import sys
from pathlib import Path

import click
from google.protobuf.json_format import MessageToDict

from protos.nightshift.v1 import admin_pb2
from services.cli.shared import admin_calls
from services.cli.shared.openai_client import id_argument
from services.cli.shared.reach_store import ask, store_options
from services.cli.shared.table import local_time, print_object, print_table

_json_option = click.option("--json", "as_json", is_flag=True, help="For programs: JSON lines.")


@click.group()
def keys() -> None:
    """Make, list and revoke API keys, each of one project.

    Until the first key is made, any key or none is taken; from then on every request needs one.
    """


@keys.command()
@click.option(
    "--project", required=True, help="Whose key; a-z, 0-9, '_' and '-'. New ones are made."
)
@click.option("--name", default="", help="To tell it from others.")
@click.option(
    "--requests-per-minute",
    type=click.IntRange(1, 2**31 - 1),
    help="How often it may call, at each gateway.  [default: no limit of its own]",
)
@_json_option
@store_options
def create(
    *,
    project: str,
    name: str,
    requests_per_minute: int | None,
    as_json: bool,
    data: Path,
    store: str | None,
) -> None:
    """Make a key and print it: the only time that it is shown.

    Works while `nightshift up` runs on the directory and while it does not.
    """
    request = admin_pb2.CreateKeyRequest(
        project_id=project, name=name, requests_per_minute=requests_per_minute
    )
    made = ask(data, store, lambda there: admin_calls.create_key(there, request), make=True)
    if as_json:
        print_object({**_object(made.key), "secret": made.secret})
        return
    print(
        f"nightshift: {made.key.id} of project {made.key.project_id}; keep it, it is not shown "
        "again",
        file=sys.stderr,
    )
    print(made.secret)


@keys.command(name="list")
@click.option("--project", default="", help="Only this one's.")
@_json_option
@store_options
def list_keys(*, project: str, as_json: bool, data: Path, store: str | None) -> None:
    """List keys, oldest first, revoked ones included."""
    found = ask(data, store, lambda there: admin_calls.list_keys(there, project))
    if as_json:
        for key in found:
            print_object(_object(key))
        return
    head = ("ID", "PROJECT", "KEY", "NAME", "PER MINUTE", "CREATED", "REVOKED")
    print_table([head, *map(_row, found)])


@keys.command()
@id_argument("key_id")
@click.option("--project", default="", help="Only where it is this one's.")
@store_options
def revoke(*, key_id: str, project: str, data: Path, store: str | None) -> None:
    """End a key, `key_…` in the list; within two seconds nobody is let in with it."""
    key = ask(data, store, lambda there: admin_calls.revoke_key(there, key_id, project))
    print(f"revoked {key.id}")


def _row(key: admin_pb2.ApiKey) -> tuple[str, ...]:
    return (
        key.id,
        key.project_id,
        f"{key.prefix}…{key.last_four}",
        key.name,
        str(key.requests_per_minute) if key.HasField("requests_per_minute") else "",
        local_time(key.created_at),
        local_time(key.revoked_at) if key.HasField("revoked_at") else "",
    )


def _object(key: admin_pb2.ApiKey) -> dict[str, object]:
    return {
        **MessageToDict(
            key, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        ),
        # 64-bit numbers, which that function spells as strings.
        "created_at": key.created_at,
        "revoked_at": key.revoked_at if key.HasField("revoked_at") else None,
        "requests_per_minute": (
            key.requests_per_minute if key.HasField("requests_per_minute") else None
        ),
    }
