"""Ends the children of a `nightshift up` that was killed.

`up` starts one of these and holds the other end of its standard input. However `up` goes, that
end closes with it; what its pid files then still name is ended, engines' own children included.
"""

import os
import signal
import sys
from pathlib import Path

from services.cli.shared.datadir import DataDir


def main() -> None:
    """Wait for standard input to end, then end what is left in the directory of argument 1."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m services.cli.up.orphan_guard DIR; `nightshift up` starts it")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A signal to all processes of a terminal or a unit is for `up` to act on.
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 64):
        pass
    # Late, so that a guard that waits holds as little as can be.
    from services.cli.up.leftovers import end_leftovers

    end_leftovers(DataDir(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
