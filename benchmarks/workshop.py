"""What benchmarks of one run share: where to say how far they are, and the one vLLM system."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from benchmarks.prompts import MODEL, chat_lines
from benchmarks.system import System, running

SEATS: Final = 64
MAX_MODEL_LEN: Final = 2048
ENGINE_ARGS: Final = (
    f"--max-num-seqs {SEATS} --max-model-len {MAX_MODEL_LEN} --max-num-batched-tokens 4096 "
    "--no-enable-prefix-caching"
)
"""Of the executor; `engine_full` gives the offline engine the same, one by one."""

_LOAD_SECONDS: Final = 300.0


class Workshop(contextlib.ExitStack):
    """Keeps the vLLM system from its first use to the end of the run."""

    def __init__(self) -> None:
        """Start nothing yet."""
        super().__init__()
        self._began = time.monotonic()
        self._vllm: System | None = None
        self._folder: Path | None = None

    def say(self, text: str) -> None:
        """Tell on standard error what happens."""
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", file=sys.stderr, flush=True)

    def model_folder(self) -> Path:
        """Return SmolLM2's folder; made where it is missing."""
        if self._folder is None:
            made = subprocess.run(
                [sys.executable, "-m", "services.executor.small_model"],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            self._folder = Path(made.stdout.splitlines()[-1])
        return self._folder

    def vllm(self) -> System:
        """Return the running system with SmolLM2 in vLLM, warm."""
        if self._vllm is None:
            self.say("starting the system with SmolLM2 in vLLM; usually 40 s")
            arguments = (
                *("--model", f"{MODEL}={self.model_folder()}"),
                *("--engine-args", f"{MODEL}: {ENGINE_ARGS}"),
            )
            self._vllm = self.enter_context(running(arguments))
            self._vllm.wait_serving(chat_lines(range(SEATS), max_tokens=4), _LOAD_SECONDS)
        return self._vllm
