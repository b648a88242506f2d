"""The fleet's shared secret, made where it is missing."""

import os
import secrets
from pathlib import Path

_BYTES = 32


def ensure_secret(path: Path) -> None:
    """Make a secret file that only its owner can read, unless there is one."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(_BYTES) + "\n")
