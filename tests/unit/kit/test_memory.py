"""Large blocks go back to the system, whatever was freed before."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit

PROGRAM = """
import ctypes, sys
from services.kit.memory import give_back_large_blocks

class Mallinfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Mallinfo
if sys.argv[1] == "given back":
    give_back_large_blocks()
block = bytearray(16 << 20)
del block
before = mallinfo().hblkhd
block = bytearray(1 << 20)
print(mallinfo().hblkhd - before >= 1 << 20)
"""


@pytest.mark.parametrize(("how", "mapped"), [("given back", "True"), ("as it is", "False")])
def test_a_frame_is_mapped_for_itself_after_a_larger_block_was_freed(how: str, mapped: str) -> None:
    # In a process of its own: the setting is the whole process's, and cannot be taken back.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == mapped
