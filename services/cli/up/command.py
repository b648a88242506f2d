"""`nightshift up`: a broker and every service as processes of their own, from one command."""

import asyncio
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import click

from services.cli.shared import which_system
from services.cli.shared.datadir import DataDir, DataDirError
from services.cli.shared.ports import FreePorts, is_free
from services.cli.up import plan as plans
from services.cli.up.fleet import Addresses, Fleet, Guard, StartError
from services.cli.up.plan import Address, Plan, PlanError
from services.kit.process import log
from services.kit.process.parent import stop_with_parent

DEFAULT_LISTEN: Final = "127.0.0.1:8000"
DEFAULT_GRPC_PORT: Final = 8001

_log = log.get_logger(__name__)


@click.command()
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    envvar=which_system.DATA_DIR,
    default=Path("nightshift-data"),
    show_default=True,
    help="Directory that holds all state; starting again goes on where it was.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default=DEFAULT_LISTEN,
    show_default=True,
    help="REST address; port 0 picks a free one.",
)
@click.option(
    "--grpc",
    metavar="HOST:PORT",
    help=f"gRPC address.  [default: port {DEFAULT_GRPC_PORT}, or a free one]",
)
@click.option("--engine", type=click.Choice(plans.ENGINES), help="vllm where --model is given.")
@click.option(
    "--model",
    "models",
    metavar="NAME=PATH",
    multiple=True,
    help="Serve the model at PATH (a folder or a Hugging Face name) as NAME; may be repeated.",
)
@click.option(
    "--engine-args",
    metavar="'NAME: …'",
    multiple=True,
    help="Arguments for NAME's engine, passed on unread.",
)
@click.option(
    "--default-max-tokens",
    metavar="'NAME: N'",
    multiple=True,
    help="Tokens that NAME generates for a line that does not say how many.",
)
@click.option(
    "--executors",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Executors for each model.",
)
@click.option(
    "--gpus",
    metavar="'NAME: 0,1'",
    multiple=True,
    help="GPUs for NAME's executors together; without it all are dealt evenly, in order.",
)
def up(
    *,
    data: Path,
    listen: str,
    grpc: str | None,
    engine: str | None,
    models: tuple[str, ...],
    engine_args: tuple[str, ...],
    default_max_tokens: tuple[str, ...],
    executors: int,
    gpus: tuple[str, ...],
) -> None:
    """Start all services on this machine and keep them running.

    Standard output carries `ready: http://HOST:PORT` and `grpc: HOST:PORT` once batches can be
    taken, and nothing else; logs go to standard error. Ctrl-C drains and stops, twice at once.
    """
    try:
        log.configure("up", os.environ.get("NIGHTSHIFT_LOG_LEVEL", "INFO"))
        chosen = plans.choose_engine(engine, models)
        read = plans.parse_models(chosen, models, engine_args, gpus, default_max_tokens)
        plan = _read_plan(listen, grpc, chosen, read, executors)
    except (PlanError, ValueError) as error:
        print(f"nightshift up: {error}", file=sys.stderr)
        sys.exit(2)
    directory = DataDir(data)
    try:
        with directory.locked() as lock:
            asyncio.run(_run(plan, directory, lock))
    except (DataDirError, StartError) as error:
        print(f"nightshift up: {error}", file=sys.stderr)
        sys.exit(1)


def _read_plan(
    listen: str,
    grpc: str | None,
    engine: str,
    models: tuple[plans.ModelPlan, ...],
    executors: int,
) -> Plan:
    rest = plans.parse_address("--listen", listen)
    public_grpc = plans.parse_address("--grpc", grpc) if grpc else None
    if engine == plans.VLLM:
        if importlib.util.find_spec("vllm") is None:
            raise PlanError("vLLM is not installed here; `make setup` installs it in .venv")
        models = tuple(replace(model, path=_checked_path(model)) for model in models)
    # The simulated engine needs no GPU; one is named for it only to try the deal out.
    named = any(model.gpus is not None for model in models)
    visible = visible_gpus(os.environ) if engine == plans.VLLM or named else ()
    return Plan(
        engine=engine,
        listen=rest,
        grpc=public_grpc,
        models=models,
        executors=plans.deal_executors(models, executors, visible),
    )


def _checked_path(model: plans.ModelPlan) -> str:
    """Return the model's path, absolute where it is one and not a Hugging Face name.

    Raises:
        PlanError: it looks like a path, and no model is there.
    """
    text = model.path or model.name
    path = Path(text).expanduser()
    if path.is_dir() and not (path / "config.json").exists():
        raise PlanError(
            f"--model {model.name}: {text} is no model's folder, which has a config.json; "
            "give the one that has"
        )
    if path.exists():
        return str(path.absolute())
    if plans.looks_like_path(text):
        raise PlanError(f"--model {model.name}: there is nothing at {text}")
    return text


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that may be used, as CUDA_VISIBLE_DEVICES or else the driver lists them."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(part.strip() for part in chosen.split(",") if part.strip() not in ("", "-1"))
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        answer = subprocess.run(
            [program, "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip())


async def _run(plan: Plan, data: DataDir, lock: int) -> None:
    stopping = asyncio.Event()
    hurry = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            hurry.set()
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    watcher = asyncio.create_task(stop_with_parent(stopping))
    if data.pids():
        # Late, because an `up` that ended cleanly left nothing.
        from services.cli.up.leftovers import end_leftovers

        for name in end_leftovers(data):
            _log.warning("leftover_ended", child=name)
    places = which_system.to_start(data, os.environ)
    _log.info("keeps", **{what: place or str(data.root) for what, place in places.items()})
    addresses = _choose_addresses(plan)
    data.ensure_secret()
    data.write_nats_config(addresses.nats.port)
    data.write_addresses(
        {
            "rest": str(addresses.gateway),
            "grpc": str(addresses.gateway_grpc),
            "store": str(addresses.store),
            "nats": str(addresses.nats),
            **places,
        }
    )
    fleet = Fleet(plan, addresses, data, os.environ)
    guard = Guard(data, lock, os.environ)
    await guard.start()
    try:
        await _serve(fleet, addresses, stopping)
    finally:
        _log.info("stopping")
        await fleet.stop(hurry)
        await guard.stop()
        watcher.cancel()


async def _serve(fleet: Fleet, addresses: Addresses, stopping: asyncio.Event) -> None:
    """Start the fleet, say where it is, and wait for the word to stop, even while it starts."""
    stop = asyncio.create_task(stopping.wait())
    start = asyncio.create_task(fleet.start())
    await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
    if not start.done():
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        return
    await start
    print(f"ready: http://{addresses.gateway}", flush=True)
    print(f"grpc: {addresses.gateway_grpc}", flush=True)
    _log.info("ready", rest=str(addresses.gateway), grpc=str(addresses.gateway_grpc))
    await stop


def _choose_addresses(plan: Plan) -> Addresses:
    """Give every service its address, once.

    Raises:
        StartError: one that was asked for is taken.
    """
    ports = FreePorts(random.Random())
    return Addresses(
        gateway=_public_address("--listen", plan.listen, ports),
        gateway_grpc=(
            _public_address("--grpc", plan.grpc, ports)
            if plan.grpc is not None
            else _default_grpc(plan.listen, ports)
        ),
        nats=ports.take(),
        store=ports.take(),
        scheduler=ports.take(),
        executors=tuple(ports.take() for _ in plan.executors),
    )


def _public_address(option: str, wanted: Address, ports: FreePorts) -> Address:
    if wanted.port == 0:
        try:
            return ports.take(wanted.host)
        except OSError as error:
            raise StartError(f"{error}; choose an address of this machine with {option}") from error
    if not is_free(wanted):
        raise StartError(f"{wanted} is in use; choose another address with {option}")
    return wanted


def _default_grpc(listen: Address, ports: FreePorts) -> Address:
    default = Address(listen.host, DEFAULT_GRPC_PORT)
    return default if listen.port and is_free(default) else ports.take(listen.host)
