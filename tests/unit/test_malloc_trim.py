"""Freed memory goes back to the system: glibc alone keeps what lies between pieces that are in use."""

import subprocess
import sys
from pathlib import Path

import pytest

#: 64 MB in pieces of 16 kB are freed but for one in 64; then how much the process still has, in kB, from its first look.
SCRIPT = """
import ctypes, sys, time
from walsender_bridge.runtime import malloc_trim

def own():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(each.split()[1]) for each in lines if each.startswith("RssAnon:"))

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
before = own()
pieces = [libc.malloc(1 << 14) for _ in range(1 << 12)]
for piece in pieces:
    ctypes.memset(piece, 1, 1 << 14)
for number, piece in enumerate(pieces):
    if number % 64:
        libc.free(ctypes.c_void_p(piece))
kept = own() - before
malloc_trim.SECONDS = 0.05
if sys.argv[1] == "returned":
    malloc_trim.start()
deadline = time.monotonic() + float(sys.argv[2])
while own() - before > 1 << 14 and time.monotonic() < deadline:
    time.sleep(0.05)
print(kept, own() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no Linux /proc")
@pytest.mark.parametrize(("what", "seconds"), [("returned", 30), ("left", 0.5)])
def test_freed_memory_is_given_back(what: str, seconds: float) -> None:
    command = [sys.executable, "-c", SCRIPT, what, str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    kept, left = map(int, done.stdout.split())
    assert kept > 48 << 10
    assert (left < 1 << 14) == (what == "returned")
