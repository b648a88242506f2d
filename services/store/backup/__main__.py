"""`python -m services.store.backup`, which `nightshift backup` and `nightshift restore` run.

The store's settings say which one is meant. JSON lines on standard output tell of progress and of
the end; exit status 0 means that it is done, 1 that it is, but for blobs that the store had lost,
and 2 that it could not be.
"""

import argparse
import asyncio
import sqlite3
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Final, NoReturn

import orjson
import sqlalchemy as sa

from services.kit.process import log
from services.kit.process.settings import SettingsError
from services.kit.wire.errors import NightshiftError
from services.store.backup.copy_blobs import CopyError
from services.store.backup.restore import restore
from services.store.backup.take import take
from services.store.backup.target import BackupError
from services.store.checkup.database_check import SchemaError
from services.store.checkup.doctor import CannotCheckError
from services.store.settings import StoreSettings
from services.store.snapshot import scratch

_TOLD: Final = (
    BackupError,
    CannotCheckError,
    CopyError,
    NightshiftError,
    SchemaError,
    SettingsError,
)
LACKS: Final = 1
CANNOT: Final = 2
INTERRUPTED: Final = 130


def _say(said: dict[str, object]) -> None:
    sys.stdout.buffer.write(orjson.dumps(said) + b"\n")
    sys.stdout.buffer.flush()


def main() -> NoReturn:
    """Do what is asked, say what came of it, and exit."""
    parser = argparse.ArgumentParser(prog="python -m services.store.backup", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    taking = commands.add_parser("take")
    taking.add_argument("--to", type=Path, required=True)
    taking.add_argument("--reuse", type=Path)
    putting_back = commands.add_parser("restore")
    putting_back.add_argument("--from", type=Path, required=True, dest="source")
    putting_back.add_argument("--with-faults", action="store_true")
    asked = parser.parse_args()
    # Standard output is for what is done.
    log.configure("backup", "ERROR")
    scratch.clear()
    try:
        settings = StoreSettings.load()
        if asked.command == "take":
            facts = asyncio.run(take(settings, asked.to, asked.reuse, _say))
        else:
            facts = asyncio.run(
                restore(asked.source, settings, _say, with_faults=asked.with_faults)
            )
    except _TOLD as error:
        _cannot(str(error))
    except OSError as error:
        _cannot(f"{error.filename or 'a file'} cannot be read or written: {error.strerror}")
    except sa.exc.DBAPIError as error:
        _cannot(f"a database cannot be read or written: {error.orig}")
    except sqlite3.Error as error:
        _cannot(f"a database cannot be read or written: {error}")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    _say({"event": "done", **asdict(facts)})
    sys.exit(LACKS if facts.missing else 0)


def _cannot(why: str) -> NoReturn:
    _say({"event": "cannot", "why": why})
    sys.exit(CANNOT)


if __name__ == "__main__":
    main()
