"""Large blocks go back to the system, whatever was freed before, and so does what lies in holes."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit

PROGRAM = """
import asyncio, ctypes, sys
from pathlib import Path
from services.store import memory

class Mallinfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Mallinfo

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1] == "prepared":
    memory.prepare()
block = bytearray(24 << 20)
del block
before = mallinfo().hblkhd
block = bytearray(8 << 20)
print(mallinfo().hblkhd - before >= 8 << 20)

# Frames between small blocks that stay.
frames, small = [], []
for _ in range(40):
    frames.append(bytearray(1 << 20))
    small.append(bytearray(1000))
frames.clear()
before = resident()
if sys.argv[1] == "prepared":
    asyncio.run(memory.give_back())
print(before - resident() > 30 << 20)
"""


@pytest.mark.parametrize(("how", "given_back"), [("prepared", True), ("as it is", False)])
def test_memory_goes_back(how: str, given_back: bool) -> None:
    # In a process of its own: what is set is the whole process's, and cannot be taken back.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(given_back)] * 2
