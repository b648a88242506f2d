"""What the commands that talk to a server share: where it is, who asks, and what errors say."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar
from urllib.parse import urlsplit

import click

from services.cli.shared.secret_options import from_file
from services.kit.wire.api_keys import Form, form_of

if TYPE_CHECKING:
    # Half a second of processor time, which commands that call no server are spared.
    import openai

DEFAULT_URL: Final = "http://127.0.0.1:8000/v1"

REFUSED: Final = 1
"""Exit status where the server says no."""
MISUSED: Final = 2
"""Exit status where what was typed, or set, cannot be."""
NOT_COMPLETED: Final = 3
"""Exit status where a batch ended as failed, expired or cancelled."""
UNREACHABLE: Final = 4
"""Exit status where no server answers."""
INTERRUPTED: Final = 130

_TIMEOUT_SECONDS: Final = 60.0

Command = TypeVar("Command", bound=Callable[..., Any])


def server_options(command: Command) -> Command:
    """Add `--base-url` and `--api-key`, which arrive as `base_url` and `api_key`."""
    url = click.option(
        "--base-url",
        envvar="NIGHTSHIFT_URL",
        default=DEFAULT_URL,
        show_default=True,
        show_envvar=True,
        help="The server.",
    )
    key = click.option(
        "--api-key",
        envvar="NIGHTSHIFT_API_KEY",
        default="none",
        show_default=True,
        show_envvar=True,
        callback=from_file("NIGHTSHIFT_API_KEY", lambda key: form_of(key) is not Form.MALFORMED),
        help="@FILE reads a file. Any will do until the server has its first key.",
    )
    return url(key(command))


def id_argument(name: str) -> Callable[[Command], Command]:
    """Add an id as the argument `name`; an empty one, as of an unset variable, is refused."""
    return click.argument(name, metavar="ID", callback=_not_empty)


def _not_empty(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    if not value.strip():
        raise click.BadParameter("it is empty")
    return value


def open_client(base_url: str, api_key: str) -> "openai.OpenAI":
    """Return the official client; an address as `nightshift up` prints it is enough.

    Ends the command where either is none: the client would say so in its own words, or not at all.
    """
    import openai

    if not _is_address(base_url):
        fail(f"--base-url takes an address such as {DEFAULT_URL}, not {base_url!r}", MISUSED)
    if not (api_key and api_key.isascii() and api_key.isprintable()):
        fail("the API key is empty, or has characters that no key has: copy it again", MISUSED)
    if not urlsplit(base_url).path.strip("/"):
        base_url = f"{base_url.rstrip('/')}/v1"
    return openai.OpenAI(
        base_url=base_url, api_key=api_key, timeout=_TIMEOUT_SECONDS, max_retries=1
    )


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


@contextlib.contextmanager
def errors_explained(base_url: str) -> Iterator[None]:
    """End the command with one line and an exit status where the server refuses or is not there."""
    import httpx2
    import openai

    try:
        yield
    except openai.APIConnectionError:
        fail(
            f"no server answers at {base_url}: start one with `nightshift up`, or name another "
            "with --base-url or NIGHTSHIFT_URL",
            UNREACHABLE,
        )
    except openai.APIStatusError as error:
        fail(_message_of(error), REFUSED)
    except openai.OpenAIError as error:
        fail(str(error), REFUSED)
    except httpx2.TransportError as error:
        # What is read bit by bit is the client's no more.
        fail(
            f"the answer of {base_url} broke off: {error}. Try again; where it always does, ask "
            "the operator, whose server's log says why",
            UNREACHABLE,
        )


def _message_of(error: "openai.APIStatusError") -> str:
    body = error.body
    message = body.get("message") if isinstance(body, dict) else None
    return f"{message or error.message} (HTTP {error.status_code})"


def fail(message: str, status: int) -> NoReturn:
    """Say what is wrong on standard error and end with `status`."""
    print(f"nightshift: {message}", file=sys.stderr)
    sys.exit(status)
