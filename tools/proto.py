"""Generates the Python code of every .proto file: messages, gRPC stubs and their types.

The import root is the checkout, so that file path, proto import and Python import agree:
protos/nightshift/v1/files.proto is protos.nightshift.v1.files_pb2. Files are made aside and moved
in one by one, so that a process that is importing them never sees half a file; code whose .proto
is gone is removed.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ("--python_out", "--grpc_python_out", "--mypy_out", "--mypy_grpc_out")


def main() -> int:
    """Regenerate all; returns protoc's exit status."""
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").rglob("*.proto"))
    # protoc finds the mypy plugins by name on PATH.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".proto-") as made:
        command = [sys.executable, "-m", "grpc_tools.protoc", "--proto_path=."]
        command += [f"{flag}={'quiet:' if 'mypy' in flag else ''}{made}" for flag in FLAGS]
        environment = {**os.environ, "PATH": path}
        done = subprocess.run(command + protos, cwd=ROOT, env=environment, check=False)
        if done.returncode != 0:
            return done.returncode
        fresh = {file.relative_to(made) for file in Path(made).rglob("*_pb2*")}
        for file in sorted(fresh):
            (Path(made) / file).replace(ROOT / file)
    for old in (ROOT / "protos").rglob("*_pb2*.py*"):
        if "__pycache__" not in old.parts and old.relative_to(ROOT) not in fresh:
            old.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
