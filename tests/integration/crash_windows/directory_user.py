"""What `nightshift up` does to the files of its directory, in a process that may be killed."""

import os
from pathlib import Path

from services.cli.shared.datadir import DataDir


def main() -> None:
    """Take the directory that `NIGHTSHIFT_TEST_DIRECTORY` names, and leave it again."""
    data = DataDir(Path(os.environ["NIGHTSHIFT_TEST_DIRECTORY"]))
    with data.locked():
        data.ensure_secret()
        data.write_nats_config(4222)
        data.write_addresses({"store": "127.0.0.1:1"})
        data.write_pid("store", os.getpid())
        data.remove_pid("store")
