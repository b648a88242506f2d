"""`nightshift doctor --check` as an operator runs it, at the end of a round."""

import asyncio
import json
import sys
from pathlib import Path


async def check_directory(data: Path) -> None:
    """Check a data directory. AssertionError with all that is at fault there."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli.main", "doctor", "--check", "--deep", "--json"),
        *("--data", str(data)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    said = json.loads(output)
    assert process.returncode == 0, json.dumps(said.get("faults", said), indent=1)
