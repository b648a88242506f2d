"""`python -m tests.chaos --minutes 60 [--seed N] [--stack embedded]`: rounds of faults for long.

Each round has a fresh system, and a seed that repeats it alone: `--seed N --rounds 1`.
"""

import asyncio
import contextlib
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import click

from tests.chaos.round import Report, play
from tests.chaos.stacks import SETTINGS, STACKS


@click.command()
@click.option("--minutes", type=float, default=10.0, show_default=True, help="For how long.")
@click.option("--seed", type=int, help="Of the first round; the next ones count on. Default: any.")
@click.option("--rounds", type=int, help="End after so many rounds.")
@click.option("--round-seconds", type=float, default=90.0, show_default=True)
@click.option("--stack", type=click.Choice(sorted(STACKS)), multiple=True, help="Default: all.")
def main(
    minutes: float,
    seed: int | None,
    rounds: int | None,
    round_seconds: float,
    stack: tuple[str, ...],
) -> None:
    """Make faults for a while, and say what came of it."""
    first = seed if seed is not None else random.SystemRandom().randrange(1_000_000)
    stacks = sorted(stack or STACKS)
    deadline = time.monotonic() + minutes * 60
    reports: list[Report] = []
    failed: list[str] = []
    number = 0
    while time.monotonic() < deadline and (rounds is None or number < rounds):
        name = stacks[number % len(stacks)]
        again = f"make chaos SEED={first + number} ARGS='--rounds 1 --stack {name}"
        again += f" --round-seconds {round_seconds:g}'"
        _say(f"--- round {number + 1} on {name}; again with: {again}")
        try:
            found = asyncio.run(_round(name, first + number, round_seconds))
        except asyncio.CancelledError:
            sys.exit(128 + signal.SIGTERM)
        if isinstance(found, Report):
            reports.append(found)
        else:
            failed.append(f"{found}; again with: {again}")
        number += 1
    _sum_up(reports, failed)
    sys.exit(1 if failed else 0)


async def _round(name: str, seed: int, seconds: float) -> Report | str:
    """Play one round; return its report, or in a few words why it failed."""
    folder = Path(tempfile.mkdtemp(prefix=f"nightshift-chaos-{seed}-"))
    system = STACKS[name](folder, SETTINGS)
    playing = asyncio.current_task()
    assert playing is not None
    # What was started is to end with us, however we are told to stop.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, playing.cancel)
    try:
        await system.open()
        report = await play(system, [seed], seconds, _say)
        await system.close()
    except BaseException as fault:
        with contextlib.suppress(Exception):
            await system.close()
        if not isinstance(fault, Exception):
            raise
        _say("".join(traceback.format_exception(fault)))
        _say(f"kept in {folder}")
        return _cause(fault)
    shutil.rmtree(folder)
    _say(str(report))
    return report


def _cause(fault: BaseException) -> str:
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    return f"{type(fault).__name__}: {fault}".partition("\n")[0][:300]


def _sum_up(reports: list[Report], failed: list[str]) -> None:
    made: Counter[str] = Counter()
    for report in reports:
        made.update(report.made)
    accounts = [report.account for report in reports if report.account is not None]
    executed = sum(account.executed for account in accounts)
    twice = sum(account.twice for account in accounts)
    hours = sum(report.seconds for report in reports) / 3_600
    print(f"rounds that held: {len(reports)}; that did not: {len(failed)}")
    print(f"hours: {hours:.2f}")
    print(f"faults made: {made.total()}")
    for what, count in sorted(made.items()):
        print(f"  {count:5} {what}")
    print(f"lines checked: {sum(account.lines for account in accounts)}")
    print("lines lost or duplicated in these rounds: 0")
    share = twice / executed if executed else 0.0
    print(f"lines executed more than once: {twice} of {executed} ({share:.2%})")
    for why in failed:
        print(f"failed: {why}")


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
