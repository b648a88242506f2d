"""Commands on models: list them, remove one."""

from pathlib import Path

import click

from services.cli.shared.admin_calls import delete_model
from services.cli.shared.openai_client import errors_explained, open_client, server_options
from services.cli.shared.progress import print_json
from services.cli.shared.reach_store import ask, store_options


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
@store_options
def remove(*, name: str, data: Path, store: str | None) -> None:
    """Remove a model's name, so that no new request may use it."""
    ask(data, store, lambda there: delete_model(there, name))
    print(f"removed {name}")
