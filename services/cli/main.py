"""The `nightshift` command: each subcommand is imported when it is called."""

import importlib
from collections.abc import Callable
from typing import Final, NoReturn

import click

# Subcommand → where it lives, and its line in the list of commands. Kept here so that `--help`
# and every command start without importing the others.
_COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "up": (
        "services.cli.up.command:up",
        "Start all services on this machine and keep them running.",
    ),
    "submit": (
        "services.cli.commands.batches:submit",
        "Upload a JSONL file and run it as a batch.",
    ),
    "watch": ("services.cli.commands.batches:watch", "Follow a batch to its end."),
    "list": ("services.cli.commands.batches:list_batches", "List batches, newest first."),
    "cancel": ("services.cli.commands.batches:cancel", "Cancel a batch; finished lines are kept."),
    "results": ("services.cli.commands.batches:results", "Download a batch's results and errors."),
    "models": ("services.cli.commands.models:models", "List or remove models."),
    "keys": ("services.cli.commands.keys:keys", "Make, list and revoke API keys."),
    "projects": ("services.cli.commands.projects:projects", "List projects and set their quotas."),
    "webhooks": ("services.cli.commands.webhooks:webhooks", "Have a server told when batches end."),
    "usage": ("services.cli.commands.usage:usage", "Sum batches, lines and tokens by key."),
    "backup": (
        "services.cli.commands.backup:backup",
        "Copy all that a store keeps, while it runs.",
    ),
    "restore": ("services.cli.commands.backup:restore", "Put a backup back into an empty store."),
    "doctor": (
        "services.cli.commands.doctor:doctor",
        "Say what is amiss, here or in a data directory.",
    ),
}
_SERVICES: Final = ("gateway", "store", "scheduler", "executor")


class _LazyGroup(click.Group):
    """A group that knows its commands by name and imports one when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all names, in the order in which a user meets them."""
        return [*_COMMANDS, *_SERVICES]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None where there is no such name."""
        if cmd_name in _SERVICES:
            return _service_command(cmd_name)
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])
        with formatter.section("Services, each alone, configured by NIGHTSHIFT_<SERVICE>_…"):
            formatter.write_dl([(name, f"Run the {name}.") for name in _SERVICES])


def _service_command(service: str) -> click.Command:
    def run() -> NoReturn:
        entry: Callable[[], NoReturn] = importlib.import_module(f"services.{service}.main").main
        entry()

    return click.Command(
        service,
        callback=run,
        help=f"Run the {service} alone; its settings are NIGHTSHIFT_{service.upper()}_…",
    )


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nightshift", prog_name="nightshift")
def main() -> None:
    """Nightshift: an OpenAI-compatible Batch API on your own GPUs."""


if __name__ == "__main__":
    main()
