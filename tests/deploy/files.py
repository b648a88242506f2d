"""What stands in deploy/, read by the programs that will read it: compose itself, python-hcl2."""

import functools
import importlib
import inspect
import json
import os
import re
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import hcl2

from services.kit.process import service as kit_service
from services.kit.process.settings import ServiceSettings

ROOT: Final = Path(__file__).resolve().parents[2]
DOCKERFILE: Final = ROOT / "deploy" / "Dockerfile"
COMPOSE: Final = ROOT / "deploy" / "compose.yaml"
NOMAD: Final = ROOT / "deploy" / "nomad" / "nightshift.nomad.hcl"
README: Final = ROOT / "deploy" / "README.md"
SCRIPTS: Final = Path(sysconfig.get_path("scripts"))

OURS: Final = ("store", "scheduler", "gateway", "executor")


# --- compose --------------------------------------------------------------------------------------


def run_compose(
    *arguments: str, file: Path = COMPOSE, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run compose on a file, with nothing in its environment but what is given."""
    return subprocess.run(
        [
            *(str(SCRIPTS / "docker-compose"), "--file", str(file), "--profile", "*"),
            # A developer's own deploy/.env stays out of it.
            *("--env-file", os.devnull, *arguments),
        ],
        capture_output=True,
        check=False,
        text=True,
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **(environment or {})},
    )


@functools.cache
def compose() -> dict[str, Any]:
    """Return compose.yaml as compose understands it: checked, merged, defaults filled in."""
    done = run_compose("config", "--format", "json")
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = json.loads(done.stdout)
    return read


def our_services() -> dict[str, dict[str, Any]]:
    """Return the services of compose.yaml that run our code, by name."""
    return {name: one for name, one in compose()["services"].items() if is_ours(one)}


def is_ours(service: dict[str, Any]) -> bool:
    """Tell whether a container runs our code: of the images that are built, only NATS' does not."""
    return "build" in service and service["build"]["target"] != "nats"


# --- Dockerfile -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the Dockerfile: what it starts from and its own instructions, in order."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)


@functools.cache
def stages() -> dict[str, Stage]:
    """Return the Dockerfile's stages by name."""
    text = re.sub(r"(?m)^\s*#.*\n", "", DOCKERFILE.read_text()).replace("\\\n", " ")
    found: dict[str, Stage] = {}
    current: Stage | None = None
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            current = found[name] = Stage(name, base)
        elif current is not None:
            current.instructions.append((word, " ".join(rest.split())))
    return found


def instructions(target: str) -> list[tuple[str, str]]:
    """Return all instructions of a target, those of the stages below it first."""
    stage = stages()[target]
    below = instructions(stage.base) if stage.base in stages() else []
    return below + stage.instructions


def last(target: str, word: str) -> str:
    """Return the last instruction of a kind; KeyError where there is none."""
    return dict(instructions(target))[word]


def image_environment(target: str) -> dict[str, str]:
    """Return what a target sets with ENV."""
    found: dict[str, str] = {}
    for word, rest in instructions(target):
        if word == "ENV":
            found |= dict(re.findall(r"(\w+)=(\S*)", rest))
    return found


# --- Nomad ----------------------------------------------------------------------------------------


@functools.cache
def nomad() -> dict[str, Any]:
    """Return the job file, parsed."""
    options = hcl2.SerializationOptions(
        strip_string_quotes=True, explicit_blocks=False, with_comments=False
    )
    with NOMAD.open() as file:
        read: dict[str, Any] = hcl2.load(file, serialization_options=options)
    return read


def labelled(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return blocks that have a label, by it."""
    return {label: body for block in blocks for label, body in block.items()}


def nomad_variables() -> dict[str, Any]:
    """Return the job file's variables and their defaults."""
    return {name: body["default"] for name, body in labelled(nomad()["variable"]).items()}


def nomad_groups() -> dict[str, Any]:
    """Return the job's groups by name."""
    groups: dict[str, Any] = labelled(labelled(nomad()["job"])["nightshift"]["group"])
    return groups


def filled_in(value: object) -> str:
    """Return a value as Nomad would hand it out, with the variables' defaults."""
    known = {f"var.{name}": default for name, default in nomad_variables().items()}
    known |= {"NOMAD_ALLOC_INDEX": 0, "NOMAD_SECRETS_DIR": "/secrets", "NOMAD_ALLOC_DIR": "/alloc"}
    return re.sub(r"\$\{([\w.]+)\}", lambda match: str(known[match[1]]), str(value))


# --- settings -------------------------------------------------------------------------------------


def settings_of(service: str) -> type[ServiceSettings]:
    """Return a service's settings class."""
    module = importlib.import_module(f"services.{service}.settings")
    (found,) = (
        one
        for _, one in inspect.getmembers(module, inspect.isclass)
        if issubclass(one, ServiceSettings) and one.__module__ == module.__name__
    )
    return found


def variables_of(service: str) -> set[str]:
    """Return the names of all variables that a service reads."""
    settings = settings_of(service)
    prefix = str(settings.model_config["env_prefix"])
    names = {
        str(one.validation_alias or f"{prefix}{name.upper()}")
        for name, one in settings.model_fields.items()
    }
    everyones = set(re.findall(r'"(NIGHTSHIFT_\w+)"', inspect.getsource(kit_service)))
    return names | everyones


def port_of(address: str) -> int:
    """Return the port of `host:port`."""
    return int(address.rpartition(":")[2])
