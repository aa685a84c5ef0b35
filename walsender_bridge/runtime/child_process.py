"""A child process of a supervisor: its settings, and its end.

The settings are a frozen dataclass that lies beside the process's module. The parent makes it from the configuration, and the
supervisor writes it to the child's standard input, as one JSON document, at each start (docs/decisions/child-settings.md):

- A configuration file that is edited meanwhile gives a restarted child no other settings than its siblings have.
- No DSN is among the arguments, which every account can read, or in the environment, which a child's own children inherit.

The only argument is the child's name, which tells processes apart in `ps`; no child reads it.
"""

import io
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from walsender_bridge.errors import TusklineError, UnavailableError
from walsender_bridge.runtime import json_model, logs, supervisor

T = TypeVar("T")
#: The largest document that a child reads, in bytes.
LIMIT_BYTES: Final = 16 << 20
_START: Final = "`tuskline up` starts this process; if Tuskline was upgraded while it ran, restart `tuskline up`"


def child(
    name: str, module: str, settings: Any, *, final: Collection[int] = ()
) -> supervisor.Child:
    """A child that runs `module` with these settings, for `Supervisor`."""
    argv = [sys.executable, "-m", module, name]
    return supervisor.Child(name, argv, stdin=json_model.encode(settings), final=final)


def run(kind: type[T], body: Callable[[T], None]) -> int:
    """In a child: receive its settings and run it. Returns the exit code: 0, or the cause of the error that ended it."""
    supervisor.exit_with_parent()
    logs.configure()
    try:
        body(received(kind))
    except TusklineError as error:
        logs.say_error(error)
        return error.cause
    return 0


@contextmanager
def disk_errors() -> Iterator[None]:
    """Name an `OSError` of the block, in which only the process's own files can fail."""
    try:
        yield
    except OSError as error:
        raise TusklineError(f"the disk failed: {error}") from error


def received(kind: type[T]) -> T:
    """The settings on standard input, which is `/dev/null` from then on.

    Raises `UnavailableError` if there are none, or they are not those of this process. That is not final for any child: a
    supervisor of another version, or a fault of the moment, must not keep a safekeeper stopped for good.
    """
    document = _document()
    if not document:
        raise UnavailableError(
            "this process received no settings on its standard input", repair=_START
        )
    if len(document) > LIMIT_BYTES:
        raise UnavailableError(f"the settings on standard input exceed {LIMIT_BYTES >> 20} MiB")
    try:
        return json_model.decode(kind, document, strict=True)
    except ValueError as error:
        raise UnavailableError(
            f"the settings on standard input are invalid: {error}", repair=_START
        ) from None


def _document() -> bytes:
    """What standard input holds up to its end, at most a byte more than `LIMIT_BYTES`; empty for a terminal."""
    try:
        if os.isatty(0):
            return b""
        with io.FileIO(0, closefd=False) as file, io.BufferedReader(file) as reader:
            return reader.read(LIMIT_BYTES + 1)
    except OSError:  # it is closed
        return b""
    finally:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        if null != 0:
            os.close(null)
