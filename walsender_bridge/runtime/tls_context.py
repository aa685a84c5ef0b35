"""The TLS context of a service or client of our own sockets, made again when the files of its certificate were replaced.

`current` is called before each connection that is accepted or opened, so a replaced certificate counts from the next one on.
Files that do not fit together change nothing: what was loaded before remains, and the log says so once for each such state.
"""

import ssl
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from walsender_bridge.errors import ConfigError
from walsender_bridge.runtime import logs
from walsender_bridge.runtime.tls_files import TlsBytes, TlsFiles, drops_authority

_log = logs.logger()

Loaded = TypeVar("Loaded")


class ReplacedFiles(Protocol):
    """The paths of a certificate's files."""

    @property
    def certificate(self) -> Path:
        """The certificate."""

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """It differs once a file has been replaced or written."""


class Reloaded(Generic[Loaded]):
    """See the module: what `load`, which raises `ConfigError` for files that are unfit, makes of them.

    Raises `ConfigError` for files that are unfit at the start. Threads may share it.
    """

    def __init__(self, files: ReplacedFiles, load: Callable[[], Loaded]) -> None:
        self._files = files
        self._load = load
        self._stamp = files.stamp()
        self._loaded = load()

    def current(self) -> Loaded:
        """What to use for the next connection."""
        stamp = self._files.stamp()
        if stamp == self._stamp:
            return self._loaded
        self._stamp = stamp
        try:
            self._loaded = self._load()
        except ConfigError as error:
            # A replacement may be halfway through; its end changes the stamp again.
            _log.warning(
                "new certificate refused; the earlier one remains in use",
                file=error.where,
                error=error.what,
                repair=error.repair,
            )
        else:
            _log.info("certificate replaced", file=str(self._files.certificate))
        return self._loaded


class TlsContext(Reloaded[ssl.SSLContext]):
    """The context for the next connection of our own sockets.

    `dropped`: how often an authority was removed from the files. Connections that began before are to be ended.
    """

    def __init__(self, files: TlsFiles, *, server: bool = False) -> None:
        self.dropped = 0
        self._server = server
        self._bytes: TlsBytes | None = None
        super().__init__(files, lambda: self._make(files))

    def _make(self, files: TlsFiles) -> ssl.SSLContext:
        context, found = files.context(server=self._server)
        if self._bytes is not None and drops_authority(self._bytes, found):
            self.dropped += 1
        self._bytes = found
        return context


@cache
def client_context(files: TlsFiles) -> TlsContext:
    """The context of this process's clients with these files: it remains what it was while files do not fit."""
    return TlsContext(files)
