"""Options whose value is a secret: everyone on the machine can read a command line."""

import sys
from collections.abc import Callable
from pathlib import Path

import click
from click.core import ParameterSource

Callback = Callable[[click.Context, click.Parameter, str | None], str | None]


def from_file(variable: str, is_secret: Callable[[str], bool]) -> Callback:
    """Return the callback of an option that reads FILE where it is given `@FILE`.

    A secret on the command line itself is taken, with a warning that names a better place.

    Args:
        variable: the environment's variable of the same meaning.
        is_secret: tells whether a value is one, and not a placeholder.
    """

    def read(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        source = context.get_parameter_source(parameter.name or "")
        if value is None or source is not ParameterSource.COMMANDLINE:
            return value
        if value.startswith("@"):
            return _content(Path(value[1:]))
        if is_secret(value):
            print(
                f"nightshift: warning: {parameter.opts[0]} shows its secret to everyone who lists "
                f"processes; use {variable}, or {parameter.opts[0]} @FILE",
                file=sys.stderr,
            )
        return value

    return read


def _content(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, ValueError) as error:
        # Not the text of a ValueError, which quotes what it read.
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise click.BadParameter(f"cannot read {file}: {why}") from None
