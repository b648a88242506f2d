"""One round: batches run on a system, a plan's faults are made, then everything is checked."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.chaos.decks import deck_of, executors_hit
from tests.chaos.ledger import Client, Ledger
from tests.chaos.load import Load
from tests.chaos.plan import Fault, Plan, draw
from tests.chaos.verify import Account, verify
from tests.kit.started_lines import read_started
from tests.kit.system import System

HALF_DONE_SECONDS: Final = 60.0
"""How long a moment is waited for in which some lines are done and others are not."""
SETTLE_SECONDS: Final = 120.0
"""Bound on all batches ending once nothing is hit any more."""

Say = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Report:
    """What a round did.

    Attributes:
        plans: its plans, one after the other.
        made: faults made while some lines were done and others not, by kind and whom they hit.
        hits: how often each executor was hit.
        account: what was checked, once it was.
        calls: how the client's calls ended.
        seconds: from the first batch to the last check.
    """

    plans: Sequence[Plan]
    made: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    account: Account | None = None
    calls: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def __str__(self) -> str:
        """Return it as a few lines."""
        calls = ", ".join(f"{count} {how}" for how, count in self.calls.most_common())
        made = ", ".join(f"{count} {what}" for what, count in sorted(self.made.items()))
        seeds = ", ".join(str(plan.seed) for plan in self.plans)
        return (
            f"seed {seeds}: {self.seconds:.0f} s, {self.made.total()} faults ({made}); "
            f"calls: {calls}; {self.account}"
        )


async def play(system: System, seeds: Sequence[int], seconds: float, say: Say) -> Report:
    """Run a round on an open system.

    Args:
        system: open, new, and nobody else's.
        seeds: of its plans; the first one's is that of the batches, too.
        seconds: for which faults are made, by all plans together.
        say: told of each fault as it is made.

    Raises:
        AssertionError, ExceptionGroup: an invariant did not hold.
    """
    deck = deck_of(system)
    plans = [draw(seed, deck, seconds / len(seeds)) for seed in seeds]
    report = Report(plans=plans)
    ledger = Ledger()
    rng = random.Random(seeds[0] + 1)
    client = Client(system.base_urls, rng, ledger)
    began = time.monotonic()
    try:
        load = Load(client, ledger, rng, f"{seeds[0]}")
        async with asyncio.TaskGroup() as group:
            running = group.create_task(load.run())
            for plan in plans:
                await _make(plan, system, load, report, say)
            load.stop()
            say("settling")
            await asyncio.wait([running], timeout=SETTLE_SECONDS)
            assert running.done(), f"not ended: {_open_batches(load)}"
        say("checking")
        started = read_started(system.started_dir)
        report.account = await verify(client, ledger, started, report.hits)
        await system.check()
    except BaseException as fault:
        report.calls, report.seconds = ledger.calls, time.monotonic() - began
        fault.add_note("\n".join(map(str, [report, *plans])))
        raise
    finally:
        await client.close()
    report.calls, report.seconds = ledger.calls, time.monotonic() - began
    return report


def _open_batches(load: Load) -> Sequence[str]:
    return [f"{each.entry.key} {each.batch}" for each in load.watched if not each.ended]


async def _make(plan: Plan, system: System, load: Load, report: Report, say: Say) -> None:
    """Make the faults, one after the other or over one another; returns when all are undone."""
    async with asyncio.TaskGroup() as group:
        for fault in plan.faults:
            await asyncio.sleep(fault.wait_seconds)
            await _until_half_done(load)
            say(str(fault))
            report.made[_name(fault)] += 1
            report.hits.update(executors_hit(fault, system.processes["executor"]))
            hit = group.create_task(_hit(system, fault))
            if not fault.overlaps:
                await asyncio.wait([hit])


def _name(fault: Fault) -> str:
    kinds = {name.rpartition("-")[0] or name for name in fault.targets}
    if fault.kind == "part":
        first = fault.targets[0].rpartition("-")[0]
        return f"part {first} from {' and '.join(fault.targets[1:])}"
    return f"{fault.kind} {'all' if len(kinds) > 1 else kinds.pop()}"


async def _until_half_done(load: Load) -> None:
    async with asyncio.timeout(HALF_DONE_SECONDS), load.progressed:
        await load.progressed.wait_for(load.half_done)


async def _hit(system: System, fault: Fault) -> None:
    if fault.kind == "kill":
        await system.kill(fault.targets, fault.seconds)
    elif fault.kind == "freeze":
        await system.freeze(fault.targets, fault.seconds)
    elif fault.kind == "restart":
        await system.restart(fault.targets)
    elif fault.kind == "part":
        await system.part(fault.targets[0], fault.targets[1:], fault.seconds)
    else:
        await system.wipe(fault.targets[0], fault.seconds)
