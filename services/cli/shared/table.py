"""What operators' commands print: rows as columns of text, or objects for programs."""

import datetime
import json
from collections.abc import Mapping, Sequence


def print_object(item: Mapping[str, object]) -> None:
    """Print an object as one line of JSON."""
    print(json.dumps(item), flush=True)


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows of equal length, the first being the head, in columns as wide as needed."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def local_time(seconds: int) -> str:
    """Return a Unix time as the clock on the wall shows it."""
    at = datetime.datetime.fromtimestamp(seconds, datetime.UTC).astimezone()
    return at.strftime("%Y-%m-%d %H:%M:%S")
