"""Python processes of a Spark job report what they decode: on their path, this file is run at their start.

Each batch that `decode_entries` yields appends a line of JSON to the file TUSKLINE_TEST_PROBE: the process,
and its ancestors' commands. The decoder then waits until there is a file of that name with `.go` behind it, so that
a test can kill in the middle, however late the other executor comes.
"""

import importlib.abc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_MODULE = "spark_consumers.decode.entries"
_LONGEST_WAIT = 300.0


def _ancestors() -> list[tuple[int, str]]:
    """This process's ancestors: pid and command."""
    found, pid = [], os.getpid()
    while pid > 1:
        with open(f"/proc/{pid}/stat") as stat:
            pid = int(stat.read().rpartition(")")[2].split()[1])
        with open(f"/proc/{pid}/cmdline") as command:
            found.append((pid, command.read().replace("\0", " ")))
    return found


def _report() -> None:
    line = json.dumps({"pid": os.getpid(), "ancestors": _ancestors()}) + "\n"
    target = os.open(os.environ["TUSKLINE_TEST_PROBE"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(target, line.encode())
    os.close(target)


def _wait() -> None:
    deadline = time.monotonic() + _LONGEST_WAIT
    while not Path(os.environ["TUSKLINE_TEST_PROBE"] + ".go").exists():
        if time.monotonic() > deadline:
            raise TimeoutError("the test does not let the decoder go on")
        time.sleep(0.05)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        self._loader = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        decode: Any = module.decode_entries

        def reporting(*arguments: Any, **options: Any) -> Iterator[Any]:
            for batch in decode(*arguments, **options):
                _report()
                _wait()
                yield batch

        module.decode_entries = reporting  # type: ignore[attr-defined]


if "TUSKLINE_TEST_PROBE" in os.environ:
    sys.meta_path.insert(0, _Finder())
