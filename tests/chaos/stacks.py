"""The stacks that rounds are played on, by name."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from tests.chaos.workload import LINE_TIMEOUT_SECONDS, SHORT_WINDOWS, STALL_SECONDS
from tests.kit.embedded import EmbeddedSystem
from tests.kit.production import APART, ProductionSystem
from tests.kit.system import System

SETTINGS: Final[Mapping[str, str]] = {
    "NIGHTSHIFT_GATEWAY_COMPLETION_WINDOWS": ",".join(("24h", *SHORT_WINDOWS)),
    "NIGHTSHIFT_EXECUTOR_LINE_TIMEOUT_SECONDS": str(LINE_TIMEOUT_SECONDS),
    "NIGHTSHIFT_EXECUTOR_DRAIN_SECONDS": "3",
    "NIGHTSHIFT_EXECUTOR_STALL_SECONDS": str(STALL_SECONDS),
}
"""What the services of a round are told."""

STACKS: Final[Mapping[str, Callable[[Path, Mapping[str, str]], System]]] = {
    "embedded": EmbeddedSystem,
    "apart": functools.partial(ProductionSystem, parts=APART),
    "production": ProductionSystem,
}
