"""`nightshift backup` and `nightshift restore`: copies of all that a store keeps."""

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import click

from services.cli.shared import store_job
from services.cli.shared.openai_client import INTERRUPTED, fail
from services.cli.shared.store_job import CANNOT, Said

_MODULE: Final = "services.store.backup"
_LACKS: Final = 1
"""Exit status of what is done, but for blobs that the store had lost."""
_SHOWN: Final = 20


@click.command()
@click.option(
    "--to",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Directory to make, or one that an interrupted backup left.",
)
@click.option(
    "--reuse",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="An older backup on the same disk: what it has already is linked, not copied.",
)
@store_job.place_options
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
def backup(
    *,
    to: Path,
    reuse: Path | None,
    data: Path,
    database_url: str | None,
    blobs_url: str | None,
    as_json: bool,
) -> None:
    """Copy all that a store keeps, as of one moment, while it runs or not.

    The backup is a data directory: `nightshift doctor --check --data` checks it, and `nightshift
    restore` puts it back. It holds what the store holds, signing secrets of webhooks included.
    """
    more = [] if reuse is None else ["--reuse", str(reuse.absolute())]
    arguments = [_MODULE, "take", "--to", str(to.absolute()), *more]
    facts = _run(arguments, store_job.place(data, database_url, blobs_url), "backup")
    _tell(facts, f"backed up to {to}", as_json=as_json)


@click.command()
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="A directory that `nightshift backup` made.",
)
@click.option(
    "--with-faults",
    is_flag=True,
    help="Put it back though the check finds faults in it, which are there then, too.",
)
@store_job.place_options
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
def restore(
    *,
    source: Path,
    with_faults: bool,
    data: Path,
    database_url: str | None,
    blobs_url: str | None,
    as_json: bool,
) -> None:
    """Put a backup back into an empty store, of the kind that it was taken from or the other.

    It is checked first. Batches that were in flight go on once services run there.
    """
    more = ["--with-faults"] if with_faults else []
    arguments = [_MODULE, "restore", "--from", str(source.absolute()), *more]
    facts = _run(arguments, store_job.place(data, database_url, blobs_url), "restore")
    _tell(facts, f"restored from {source}", as_json=as_json)


def _run(arguments: list[str], settings: dict[str, str], command: str) -> Said:
    end: Said = {}
    draws = sys.stderr.isatty()

    def take(said: Said) -> None:
        if said["event"] == "progress":
            if draws:
                print(f"\r\x1b[K  {_progress(said)} …", end="", file=sys.stderr, flush=True)
        else:
            end.update(said)

    status = store_job.run(arguments, settings, take)
    if draws:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if status == INTERRUPTED:
        sys.exit(INTERRUPTED)
    if status not in (0, _LACKS) or end.pop("event", "") != "done":
        fail(str(end.get("why", f"the {command} failed; the lines above say why")), CANNOT)
    return end


def _progress(said: Said) -> str:
    of = f" of {said['of']:,}" if "of" in said else ""
    size = f", {said['bytes'] / 1e6:,.0f} MB" if "bytes" in said else ""
    return f"{said['what']}: {said['done']:,}{of}{size}"


def _tell(facts: dict[str, Any], what: str, *, as_json: bool) -> None:
    missing = facts["missing"]
    if as_json:
        print(json.dumps(facts))
        sys.exit(_LACKS if missing else 0)
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts["taken_at"]))
    print(
        f"{what}: {facts['rows']:,} rows and {facts['blobs']:,} blobs of {facts['bytes']:,} bytes,"
        f" as of {moment}"
    )
    if missing:
        names = "".join(f"\n  blobs/{name}" for name in missing[:_SHOWN])
        more = f"\n  and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        fail(
            f"the store had lost {len(missing)} of its blobs, or a piece of them, so that they are "
            "not whole in it either; all else is. `nightshift doctor --check` says whose they are "
            f"and what to do:{names}{more}",
            _LACKS,
        )
