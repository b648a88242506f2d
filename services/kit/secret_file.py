"""The fleet's shared secret, made where it is missing."""

import contextlib
import os
import secrets
from pathlib import Path

from services.kit import fsync
from services.kit.process import failpoints

_BYTES = 32


def ensure_secret(path: Path) -> None:
    """Make a secret file that only its owner can read, unless there is one.

    It appears whole: a service that starts at the same moment never reads half of it.
    """
    if path.exists():
        return
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(_BYTES) + "\n")
        file.flush()
        os.fsync(file.fileno())
    # A link, unlike a rename, never replaces the secret that somebody else made meanwhile.
    with contextlib.suppress(FileExistsError), failpoints.around("secret.make"):
        path.hardlink_to(unfinished)
    unfinished.unlink()
    fsync.sync(path.parent)
