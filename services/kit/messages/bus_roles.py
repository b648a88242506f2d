"""Who may do what at the broker, and the part of its configuration that says so. Pure.

deploy/nats.conf holds the same text; a test compares the two.
"""

from collections.abc import Mapping
from typing import Final

OPERATOR: Final = "operator"
"""Whoever looks after the broker, with its own tools: may do anything."""

_STREAMS: Final = ("WORK", "EVENTS", "KV_executors")
_MAKES_STREAMS: Final = tuple(
    f"$JS.API.STREAM.{verb}.{stream}"
    for stream in _STREAMS
    for verb in ("INFO", "CREATE", "UPDATE")
)
_PUBLISHES: Final[Mapping[str, tuple[str, ...]]] = {
    "store": ("nightshift.event.>", *_MAKES_STREAMS),
    "scheduler": (
        "nightshift.work.>",
        *_MAKES_STREAMS,
        # One whose files are damaged is made anew.
        "$JS.API.STREAM.DELETE.WORK",
        "$JS.API.CONSUMER.INFO.WORK.*",
        "$JS.API.CONSUMER.CREATE.WORK.>",
        "$JS.API.CONSUMER.DURABLE.CREATE.WORK.*",
        "$JS.API.DIRECT.GET.KV_executors",
    ),
    "executor": (
        "nightshift.room.*",
        "$KV.executors.*",
        "$JS.API.CONSUMER.INFO.WORK.*",
        "$JS.API.CONSUMER.MSG.NEXT.WORK.*",
        "$JS.ACK.WORK.>",
    ),
}
_HEARS: Final[Mapping[str, tuple[str, ...]]] = {
    "store": (),
    "scheduler": ("nightshift.event.>", "nightshift.room.>"),
    "executor": ("nightshift.event.>",),
}
ROLES: Final = (*_PUBLISHES, OPERATOR)


def inbox_prefix(role: str) -> str:
    """Return how the subjects begin on which a role gets answers, which no other role hears."""
    return f"_INBOX_{role}"


def authorization(passwords: Mapping[str, str]) -> str:
    """Return the `authorization` block of a nats-server.

    Args:
        passwords: by role, as they are written there: a quoted text, or `$NAME` of a variable.
    """
    users = "".join(_user(role, passwords[role]) for role in ROLES)
    return f"authorization {{\n  users = [\n{users}  ]\n}}\n"


def _user(role: str, password: str) -> str:
    head = f"    {{\n      user: {role}\n      password: {password}\n"
    if role == OPERATOR:
        return f"{head}    }}\n"
    hears = (*_HEARS[role], f"{inbox_prefix(role)}.>")
    return (
        f"{head}      permissions: {{\n"
        f"        publish: [\n{_listed(_PUBLISHES[role])}        ]\n"
        f"        subscribe: [\n{_listed(hears)}        ]\n"
        "      }\n    }\n"
    )


def _listed(subjects: tuple[str, ...]) -> str:
    return "".join(f'          "{subject}"\n' for subject in subjects)
