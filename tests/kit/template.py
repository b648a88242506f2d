"""Services as real processes that start in a moment: copies of one that has imported everything.

A suite that kills a service at each step of its work starts hundreds of them, and most of a start
is importing. The template imports once; each service is a copy of it by fork, made before anything
of gRPC runs, with an environment and a log of its own.
"""

import asyncio
import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import psutil
import pytest

from tests.kit.eventually import eventually

STOP_SECONDS: Final = 60.0
_MODULES: Final = (
    "services.store.main",
    "services.scheduler.main",
    "services.executor.main",
    "services.executor.engines.simulated.engine",
    "alembic.command",
    "alembic.config",
    "logging.config",
)


class Template:
    """The process that is copied."""

    def __init__(self) -> None:
        """Start it; returns before it has imported everything."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.template"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def copy(
        self,
        module: str,
        environment: Mapping[str, str],
        log: Path,
        constants: Mapping[str, object],
    ) -> int:
        """Run the `main` of a module in a copy; return its process id.

        Args:
            module: by its full name.
            environment: on top of ours.
            log: where its output goes.
            constants: values that it has in place of what the modules say, by their full names.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {
            "module": module,
            "environment": {**os.environ, **environment},
            "log": str(log),
            "constants": dict(constants),
        }
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End it; copies that run end by themselves."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait(STOP_SECONDS)
        self._process.stdout.close()


class Copied:
    """A service that may be killed, frozen, and started again."""

    def __init__(
        self,
        template: Template,
        module: str,
        environment: Mapping[str, str],
        log: Path,
        *,
        constants: Mapping[str, object] | None = None,
    ) -> None:
        """Describe it; `start` runs it. For the arguments see `Template.copy`."""
        self.environment = dict(environment)
        self.constants = dict(constants or {})
        self.pid = 0
        self._template = template
        self._module = module
        self._log = log

    def start(self, environment: Mapping[str, str] | None = None) -> None:
        """Start it, with this environment on top of its own."""
        assert not self.runs, "already running"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self.pid = self._template.copy(
            self._module, {**self.environment, **(environment or {})}, self._log, self.constants
        )

    @property
    def runs(self) -> bool:
        """Whether the process is there, stopped or not."""
        return self.pid != 0 and psutil.pid_exists(self.pid)

    @property
    def frozen(self) -> bool:
        """Whether all of it stands still."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        return False

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it is there."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL where that does not end it; raises AssertionError then."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        try:
            await self._gone()
        except AssertionError as error:
            # It says what it is about.
            self.send(signal.SIGUSR2)
            await asyncio.sleep(1)
            error.add_note(self.log()[-8_000:])
            raise
        finally:
            await self.kill()

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.send(signal.SIGKILL)
        await self._gone()

    async def _gone(self) -> None:
        """Wait for the end of what runs now: somebody may start it again at once."""
        pid = self.pid
        await eventually(
            lambda: pid == 0 or not psutil.pid_exists(pid), within_seconds=STOP_SECONDS
        )

    def log(self) -> str:
        """All that it logged."""
        return self._log.read_text() if self._log.exists() else ""


@pytest.fixture(scope="session")
def template() -> Iterator[Template]:
    """Have one template for all tests of a worker."""
    made = Template()
    yield made
    made.close()


# --- in the template ------------------------------------------------------------------------------


def _main() -> None:
    for module in _MODULES:
        importlib.import_module(module)
    # Copies that end are nobody's to wait for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(asked)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


def _become(asked: dict[str, Any]) -> NoReturn:
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for of_ours, of_it in ((0, nothing), (1, log), (2, log)):
            os.dup2(of_it, of_ours)
        os.environ.clear()
        os.environ.update(asked["environment"])
        os.environ["NIGHTSHIFT_DIE_WITH_PARENT"] = str(os.getppid())
        faulthandler.register(signal.SIGUSR2)
        from services.kit.process import failpoints

        # They were read when the template imported them.
        failpoints._failpoints = failpoints.Failpoints(
            os.environ.get("NIGHTSHIFT_FAILPOINTS", ""),
            os.environ.get("NIGHTSHIFT_FAILPOINTS_DIR", ""),
        )
        for name, value in asked["constants"].items():
            module, _, constant = name.rpartition(".")
            assert hasattr(importlib.import_module(module), constant), name
            setattr(importlib.import_module(module), constant, value)
        importlib.import_module(asked["module"]).main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001 - told, and then it ends
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _main()
