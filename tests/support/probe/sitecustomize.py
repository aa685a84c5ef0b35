"""Python processes of a Spark job report what they decode and write: on their path, this file is run at their start.

Each batch that `decode_entries` yields appends a line of JSON to the file TUSKLINE_TEST_PROBE: the process,
and its ancestors' commands. The decoder then waits until there is a file of that name with `.go` behind it, so that
a test can kill in the middle, however late the other executor comes.

Once there is a file of that name with `.slow` behind it, each part of a copy appends a line in which `part` is true, and takes
two seconds longer: so long that Spark asks for another executor meanwhile.

Once there is a file of that name with `.half` behind it, each data file is written in half first: that appends a line in which
`half` is the file's name, and waits for the file with `.whole` behind it.
"""

import importlib.abc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_DECODER, _FILES = "spark_consumers.decode.entries", "spark_consumers.lake.format.data_files"
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


def _report(**more: str | bool) -> None:
    line = json.dumps({"pid": os.getpid(), "ancestors": _ancestors(), **more}) + "\n"
    target = os.open(os.environ["TUSKLINE_TEST_PROBE"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(target, line.encode())
    os.close(target)


def _wait(name: str) -> None:
    deadline = time.monotonic() + _LONGEST_WAIT
    while not Path(f"{os.environ['TUSKLINE_TEST_PROBE']}.{name}").exists():
        if time.monotonic() > deadline:
            raise TimeoutError("the test does not let this process go on")
        time.sleep(0.05)


def _watch_decoder(module: Any) -> None:
    decode = module.decode_entries

    def reporting(*arguments: Any, **options: Any) -> Iterator[Any]:
        for batch in decode(*arguments, **options):
            _report()
            _wait("go")
            yield batch

    module.decode_entries = reporting


def _watch_files(module: Any) -> None:
    writer = module.PartsWriter

    def probed(file: Any, *arguments: Any) -> Any:
        if Path(os.environ["TUSKLINE_TEST_PROBE"] + ".half").exists():
            file.write(b"PAR1 and half of the rows")
            file.flush()
            _report(half=Path(file.name).name)
            _wait("whole")
            file.seek(0)
            file.truncate()
        if Path(os.environ["TUSKLINE_TEST_PROBE"] + ".slow").exists():
            _report(part=True)
            time.sleep(2)
        return writer(file, *arguments)

    module.PartsWriter = probed


_WATCHED: dict[str, Callable[[Any], None]] = {_DECODER: _watch_decoder, _FILES: _watch_files}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self) -> None:
        self._loaders: dict[str, importlib.abc.Loader] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname not in _WATCHED or fullname in self._loaders:
            return None
        # This finder is asked again, and then finds nothing.
        self._loaders[fullname] = self
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        self._loaders[fullname] = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loaders[spec.name].create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loaders[module.__name__].exec_module(module)
        _WATCHED[module.__name__](module)


if "TUSKLINE_TEST_PROBE" in os.environ:
    sys.meta_path.insert(0, _Finder())
