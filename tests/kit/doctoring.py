"""`nightshift doctor --check` as an operator runs it, on whatever a store keeps its things in."""

import asyncio
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_NAMED: Final = re.compile(r"nightshift: the .+ is .+, as NIGHTSHIFT_\w+ says\n")
"""How it says on what it acts, where that stands in the environment."""


async def doctor_check(place: Path | Mapping[str, str], *, deep: bool = False) -> None:
    """Check all that a store keeps. AssertionError with what is at fault there.

    Args:
        place: its data directory, or its settings that say where database and blobs are.
        deep: read the content of every file too.
    """
    named = ("--data", str(place)) if isinstance(place, Path) else ()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli.main", "doctor", "--check", "--json"),
        *(("--deep",) if deep else ()),
        *named,
        env=None if isinstance(place, Path) else {**os.environ, **place},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    complaints = _NAMED.sub("", errors.decode(errors="replace"))
    assert not complaints, complaints
    said = json.loads(output)
    assert process.returncode == 0, json.dumps(said.get("faults", said), indent=1)
