"""`python -m tests.support.process_facts`: what a process can see of how it was started, as JSON."""

import contextlib
import gc
import json
import os
import resource
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any


def facts() -> dict[str, Any]:
    """All but what is different in each process."""
    status = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines()
    )
    command = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
    names = ("Umask", "Threads", "SigBlk", "SigIgn", "SigCgt", "ShdPnd", "CapEff", "NoNewPrivs")
    return {
        "kernel": {name: status.get(name) for name in names},
        "command": command,
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "main": sys.modules["__main__"].__name__,
        "environment": {
            # Sums, since a failed comparison is shown.
            name: zlib.crc32(value.encode())
            for name, value in os.environ.items()
        },
        "folder": str(Path.cwd()),
        "zone": time.tzname,
        "files": sorted(_open_files()),
        "group": os.getpgid(0),
        "session": os.getsid(0),
        "nice": os.nice(0),
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS},
        "cpus": sorted(os.sched_getaffinity(0)),
        "handlers": {str(each): str(signal.getsignal(each)) for each in signal.valid_signals()},
        "wakeup": signal.set_wakeup_fd(-1),
        "buffering": [sys.stdout.line_buffering, sys.stderr.line_buffering],
        "encoding": [sys.stdout.encoding, sys.getfilesystemencoding()],
        "gc": [gc.isenabled(), gc.get_threshold()],
    }


_LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]


def _open_files() -> list[tuple[int, str, bool]]:
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one of the listing itself
            found.append((int(each.name), str(each.readlink()), os.get_inheritable(int(each.name))))
    return found


if __name__ == "__main__":
    print(json.dumps(facts()), flush=True)
