"""The process behind `nightshift backup` and `restore`, which may be killed at any step of it."""

import json
import os
import sys

from services.store.backup.__main__ import main as run


def main() -> None:
    """Do what the arguments in `NIGHTSHIFT_TEST_ARGUMENTS` say."""
    sys.argv[1:] = json.loads(os.environ["NIGHTSHIFT_TEST_ARGUMENTS"])
    run()
