"""Commands on models: list them, remove one."""

import asyncio
from pathlib import Path

import click

from services.cli import system
from services.cli.admin import delete_model
from services.cli.client import REFUSED, errors_explained, fail, open_client, server_options
from services.cli.datadir import DataDir, DataDirError
from services.cli.progress import print_json
from services.kit.errors import NightshiftError, UnavailableError


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="For programs: JSON lines.")
@server_options
@click.pass_context
def models(context: click.Context, *, as_json: bool, base_url: str, api_key: str) -> None:
    """List the models that requests may name, or remove one."""
    if context.invoked_subcommand is not None:
        return
    with errors_explained(base_url):
        listed = list(open_client(base_url, api_key).models.list())
    for model in listed:
        if as_json:
            print_json(model)
        else:
            print(model.id)


@models.command()
@click.argument("name")
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    envvar=system.DATA_DIR,
    default=Path("nightshift-data"),
    show_default=True,
    help="The directory of the running `nightshift up`.",
)
def remove(*, name: str, data: Path) -> None:
    """Remove a model's name, so that no new request may use it."""
    directory = DataDir(data)
    try:
        store, secret = directory.read_address("store"), directory.read_secret()
        asyncio.run(delete_model(store, secret, name))
    except UnavailableError:
        fail(f"nothing runs on {data}: start it with `nightshift up --data {data} …`", REFUSED)
    except (DataDirError, NightshiftError) as error:
        fail(str(error), REFUSED)
    print(f"removed {name}")
