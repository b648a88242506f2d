"""The data directory of `nightshift up`: its lock, its secret, and who runs in it."""

import contextlib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from services.kit.messages.bus_roles import ROLES, authorization
from services.kit.process import failpoints

OWNER_VARIABLE: Final = "NIGHTSHIFT_UP_DATA"
"""Set for every child to its data directory, so that a pid read from a file is known as ours."""

_LOCK_WAIT_SECONDS: Final = 10.0


class DataDirError(Exception):
    """The directory cannot be used; the message says why and what to do."""


class DataDirInUseError(DataDirError):
    """Another `nightshift up` runs on it."""


class DataDir:
    """A data directory; every name below it is ours, none comes from a user."""

    def __init__(self, root: Path) -> None:
        """Name the directory; nothing is made yet."""
        self.root = root.absolute()
        self.run = self.root / "run"
        self.nats_config = self.root / "nats.conf"
        self._secret = self.root / "secret"
        self._addresses = self.root / "addresses.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Make the directory and hold its lock; yields the lock's file descriptor.

        The lock lasts until the last process that inherited the descriptor ends, so that it is
        free only when nothing of an earlier `up` runs any more.

        Raises:
            DataDirError: it cannot be made, or another `up` has it.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.run.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _unusable(self.root, error) from error
        try:
            self._lock(descriptor)
            try:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            except OSError as error:
                raise _unusable(self.root, error) from error
            yield descriptor
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        deadline = time.monotonic() + _LOCK_WAIT_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                holder = os.pread(descriptor, 20, 0).decode(errors="replace")
            # The lock outlives a killed `up` for as long as its children take to end.
            if _is_running(holder) or time.monotonic() > deadline:
                raise DataDirInUseError(
                    f"{self.root} is in use by `nightshift up` (process {holder or 'unknown'}); "
                    "stop that one, or choose another directory with --data"
                )
            time.sleep(0.05)

    def ensure_secret(self) -> Path:
        """Return the services' secret file, made with mode 0600 where it is missing.

        Raises:
            DataDirError: it cannot be written; likewise for all that is written here.
        """
        if not self._secret.exists():
            _write("up.secret", self._secret, secrets.token_hex(32) + "\n")
            _sync(self.root)
        return self._secret

    def write_nats_config(self, port: int) -> None:
        """Write the broker's configuration and new passwords for all who may use it.

        Its paths are relative to the directory.
        """
        passwords = {role: secrets.token_hex(32) for role in ROLES}
        try:
            self.nats_password("").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise _unusable(self.root, error) from error
        texts = {self.nats_password(role): f"{to}\n" for role, to in passwords.items()}
        texts[self.nats_config] = (
            'host: "127.0.0.1"\n'
            f"port: {port}\n"
            'server_name: "nightshift"\n'
            # Its own format, so not among the JSON lines on standard error; bounded.
            'log_file: "nats.log"\n'
            "logfile_size_limit: 4MB\n"
            "logfile_max_num: 2\n"
            'jetstream { store_dir: "nats" }\n'
            + authorization({role: f'"{password}"' for role, password in passwords.items()})
        )
        for path, text in texts.items():
            _write("up.nats_config", path, text)

    def nats_password(self, role: str) -> Path:
        """Return the file with the password by which a role logs in at the broker."""
        return self.root / "nats-passwords" / role

    def write_addresses(self, addresses: dict[str, str]) -> None:
        """Record where services listen and keep things, for commands that name the directory."""
        _write("up.addresses", self._addresses, json.dumps(addresses) + "\n")
        _sync(self.root)

    def read_secret(self) -> str:
        """Return the services' secret. Raises `DataDirError` where no `up` ever ran."""
        return self._read(self._secret).strip()

    def read_address(self, service: str) -> str:
        """Return where a service listens. Raises `DataDirError` where no `up` ever ran."""
        if address := self.noted(service):
            return address
        raise DataDirError(
            f"{self.root} does not say where its {service} listens: name the directory of a "
            "`nightshift up` that runs with --data, or try again if that is starting"
        )

    def noted(self, what: str) -> str:
        """Return what was last noted of something; empty where nothing was."""
        try:
            noted = json.loads(self._addresses.read_text())
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise DataDirError(f"{self._addresses} cannot be read: {error.strerror}") from error
        except ValueError:
            noted = None
        if not isinstance(noted, dict):
            raise DataDirError(
                f"{self._addresses} is damaged, which says where the system of {self.root} is: "
                "put it back from a copy, or delete it if all of that system is in the directory"
            )
        return str(noted.get(what, ""))

    def _read(self, path: Path) -> str:
        try:
            return path.read_text()
        except OSError as error:
            raise DataDirError(
                f"{self.root} holds no {path.name}: name the directory that "
                "`nightshift up` uses with --data"
            ) from error

    def pids(self) -> dict[int, str]:
        """Return what the pid files say: process id → name of the child."""
        found = {}
        for file in self.run.glob("*.pid"):
            # A child that ends meanwhile takes its file with it.
            with contextlib.suppress(FileNotFoundError):
                text = file.read_text().strip()
                if text.isdigit():
                    found[int(text)] = file.stem
        return found

    def write_pid(self, name: str, pid: int) -> None:
        """Record a running child; readers see the whole file or none."""
        # The half-written file stays outside run/, which holds pid files and nothing else.
        beside = self.root / f".{name}.pid.new"
        _write("up.pid", self.run / f"{name}.pid", f"{pid}\n", beside, synced=False)

    def remove_pid(self, name: str) -> None:
        """Forget a child that is gone."""
        with failpoints.around("up.forget_pid"):
            (self.run / f"{name}.pid").unlink(missing_ok=True)


def _unusable(path: Path, error: OSError) -> DataDirError:
    return DataDirError(f"{path} cannot be used: {error.strerror}")


def _write(
    step: str, path: Path, text: str, beside: Path | None = None, *, synced: bool = True
) -> None:
    """Write a file so that readers see all of it or nothing; `step` names its failpoints.

    Where it is `synced`, that is so after a power cut, too.

    Raises:
        DataDirError: it cannot be written.
    """
    beside = beside or path.with_name(f".{path.name}.new")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            if synced:
                os.fsync(descriptor)
        with failpoints.around(step):
            beside.replace(path)
    except OSError as error:
        raise _unusable(path, error) from error


def _sync(folder: Path) -> None:
    """Wait until the names in a folder are on disk.

    Raises:
        DataDirError: they cannot be synced.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unusable(folder, error) from error


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
