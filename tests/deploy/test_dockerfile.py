"""The Dockerfile: what its linter says, what it installs, who runs, how health is asked for."""

import fnmatch
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deploy import files

pytestmark = [pytest.mark.deploy, pytest.mark.slow]

SERVICE_TARGETS = (
    "store",
    "scheduler",
    "gateway",
    "executor-simulated",
    "executor-cpu",
    "executor-cuda",
)
TARGETS = (*SERVICE_TARGETS, "cli")


def hadolint(file: Path) -> subprocess.CompletedProcess[str]:
    """Lint a Dockerfile; every finding, however small, is a failure."""
    return subprocess.run(
        [str(files.SCRIPTS / "hadolint"), "--failure-threshold", "style", str(file)],
        capture_output=True,
        check=False,
        text=True,
    )


def test_its_linter_finds_nothing() -> None:
    done = hadolint(files.DOCKERFILE)
    assert done.returncode == 0, done.stdout


def test_the_linter_finds_what_is_wrong(tmp_path: Path) -> None:
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM python:latest\nRUN pip install uvloop\n")
    done = hadolint(wrong)
    assert done.returncode != 0
    assert "DL3007" in done.stdout


def test_images_come_from_the_default_registry_by_a_fixed_tag() -> None:
    (python,) = re.findall(r"(?m)^ARG PYTHON_IMAGE=(\S+)$", files.DOCKERFILE.read_text())
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", python)
    for stage in files.stages().values():
        assert stage.base == "${PYTHON_IMAGE}" or stage.base in files.stages()


def test_its_python_is_one_that_the_project_takes() -> None:
    (minor,) = re.findall(r"python:3\.(\d+)-slim", files.DOCKERFILE.read_text())
    project = tomllib.loads((files.ROOT / "pyproject.toml").read_text())["project"]
    (bounds,) = re.findall(r"^>=3\.(\d+),<3\.(\d+)$", project["requires-python"])
    low, high = bounds
    assert int(low) <= int(minor) < int(high)


def test_packages_come_from_hashed_lists_only() -> None:
    lists = set()
    for stage in files.stages().values():
        for word, rest in stage.instructions:
            if word != "RUN" or "pip install" not in rest:
                continue
            if "--requirement" in rest:
                assert "--require-hashes" in rest
                assert "--no-deps" in rest
                lists |= set(re.findall(r"--requirement (\S+)", rest))
            else:
                # What was built here, and the one package that is on no index with a hash.
                assert re.search(r"--no-deps (wheels/\*\.whl|torch==\S+\+cpu )", rest)
    assert lists == {f"requirements/{name}.txt" for name in ("base", "cpu", "cuda")}
    for name in lists:
        for entry in re.split(r"(?m)^(?=\S)", (files.ROOT / name).read_text()):
            assert not entry or re.match(r"[\w.\[\]-]+==\S+", entry), entry
            assert not entry or "--hash=sha256:" in entry, entry


def test_torch_is_the_one_that_setup_installs() -> None:
    spec = importlib.util.spec_from_file_location("setup", files.ROOT / "tools" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    versions = re.findall(r"torch==(\S+)", files.DOCKERFILE.read_text())
    assert versions == [f"{setup.TORCH}+cpu", setup.TORCH]


@pytest.mark.parametrize("target", TARGETS)
def test_nobody_runs_as_root(target: str) -> None:
    user, _, group = files.last(target, "USER").partition(":")
    assert int(user) > 0
    assert int(group) > 0


@pytest.mark.parametrize("target", TARGETS)
def test_no_engine_where_none_runs(target: str) -> None:
    sources = [rest for word, rest in files.instructions(target) if word == "COPY"]
    engine = {"executor-cpu": "cpu", "executor-cuda": "cuda"}.get(target, "base")
    assert sources == [f"--from={engine}-packages /opt/nightshift /opt/nightshift"]


@pytest.mark.parametrize("target", SERVICE_TARGETS)
def test_a_health_check_asks_where_the_service_listens(target: str) -> None:
    service = target.partition("-")[0]
    environment = files.image_environment(target)
    # The gateway's health service is on its gRPC port.
    grpc = "GRPC_LISTEN" if service == "gateway" else "LISTEN"
    listen = environment[f"NIGHTSHIFT_{service.upper()}_{grpc}"]
    port = files.port_of(listen)
    check = files.last(target, "HEALTHCHECK")
    assert check.endswith(f'CMD ["python", "-m", "services.kit.calls.probe", "127.0.0.1:{port}"]')
    assert str(port) in files.last(target, "EXPOSE").split()
    assert files.last(target, "CMD") == f'["{service}"]'


def test_all_that_is_copied_is_there_and_seen() -> None:
    # At the root, where every builder looks for it.
    ignored = (files.ROOT / ".dockerignore").read_text().split("\n")
    seen = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    copied = set()
    for word, rest in files.instructions("build"):
        if word == "COPY":
            copied |= set(rest.split()[:-1])
    for target in ("base-packages", "cpu-packages", "cuda-packages", "nats"):
        for word, rest in files.instructions(target):
            if word == "COPY" and "--from" not in rest:
                copied |= set(rest.split()[:-1])
    for name in copied:
        assert (files.ROOT / name).exists(), name
    # Of deploy/, which holds secrets, no more than these files.
    in_deploy = {name for name in copied if name.startswith("deploy/")}
    assert in_deploy | {name.partition("/")[0] for name in copied - in_deploy} == seen


def test_no_service_is_built_after_an_engine() -> None:
    """Docker's classic builder builds every stage above its target."""
    names = list(files.stages())
    first_of_engine = min(names.index(name) for name in ("cpu-packages", "cuda-packages"))
    assert {name for name in TARGETS if names.index(name) > first_of_engine} == {
        "executor-cpu",
        "executor-cuda",
    }


def test_the_build_stage_makes_a_wheel_that_runs(tmp_path: Path) -> None:
    """Follow the stage's own instructions, but for the one that installs the tools."""
    source = tmp_path / "src"
    source.mkdir()
    (source / ".venv").symlink_to(sys.prefix)
    ran = []
    for word, rest in files.stages()["build"].instructions:
        if word == "COPY":
            *names, into = rest.split()
            copy_as_seen(names, source / into)
        elif word == "RUN" and "tools/setup.py" not in rest:
            subprocess.run(["sh", "-c", rest], cwd=source, check=True, capture_output=True)
            ran.append(rest)
    assert len(ran) == 1

    (wheel,) = (source / "wheels").glob("*.whl")
    installed = tmp_path / "installed"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(installed)], check=True)
    modules = ["services.kit.calls.probe", *(f"services.{one}.main" for one in files.OURS)]
    code = "import importlib, sys\n" + "".join(
        f"assert importlib.import_module({one!r}).__file__.startswith({str(installed)!r})\n"
        for one in modules
    )
    code += "assert not {'torch', 'vllm'} & set(sys.modules)\n"
    subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed)},
        check=True,
    )
    assert any(installed.rglob("script.py.mako")), "the store's migrations are incomplete"
    starts(installed, tmp_path)


def starts(installed: Path, folder: Path) -> None:
    """Have `nightshift up` of an installed wheel get ready outside the checkout, and stop it."""
    command = [sys.executable, "-P", "-m", "services.cli.main", "up", "--engine", "simulated"]
    with subprocess.Popen(
        [*command, "--data", str(folder / "data"), "--listen", "127.0.0.1:0"],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(installed)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as up:
        assert up.stdout is not None
        try:
            assert up.stdout.readline().startswith("ready: http://127.0.0.1:")
            assert up.stdout.readline().startswith("grpc: 127.0.0.1:")
        finally:
            up.terminate()
    assert up.returncode == 0


def copy_as_seen(names: list[str], into: Path) -> None:
    """Copy files as a build would see them, without what .dockerignore leaves out."""
    for name in names:
        source = files.ROOT / name
        inside = [source] if source.is_file() else source.rglob("*")
        for file in inside:
            left_out = fnmatch.fnmatch(file.name, "*_pb2*") or "__pycache__" in file.parts
            if file.is_file() and not left_out:
                place = into / (file.name if source.is_file() else file.relative_to(source))
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(file.read_bytes())
