"""A process that ends an engine's processes when the executor cannot: after SIGKILL.

vLLM's workers watch their parent, but its EngineCore does not: it would hold the accelerator's
memory for ever. So the executor starts this program with a pipe as its standard input and
writes the ids of the engine's processes, one a line, as they come up. End of input means that
the executor is gone, however it went; what is then left of them is killed.

It is run by file name and imports nothing of ours, so that it is up in some 50 ms.
"""

import signal
import sys

import psutil


def main() -> None:
    """Collect ids until standard input ends, then kill what still runs under them."""
    # Ctrl-C and SIGTERM reach the whole process group; the executor's end is what counts here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes: dict[int, psutil.Process] = {}
    for line in sys.stdin:
        pid = int(line)
        try:
            processes[pid] = psutil.Process(pid)
        except psutil.NoSuchProcess:
            continue
    for process in processes.values():
        try:
            # psutil compares start times: a number that was given anew is left alone.
            process.kill()
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    main()
