"""The TLS context of a service or client of our own sockets, made again when the files of its certificate were replaced.

`current` is called before each connection that is accepted or opened, so a replaced certificate counts from the next one on.
Files that do not fit together change nothing: the earlier context remains, and the log says so once for each such state.
"""

import ssl
from functools import cache

from walsender_bridge.errors import ConfigError
from walsender_bridge.runtime import logs
from walsender_bridge.runtime.tls_files import TlsFiles

_log = logs.logger()


class TlsContext:
    """See the module. Raises `ConfigError` for files that are unfit at the start. Threads may share it."""

    def __init__(self, files: TlsFiles, *, server: bool = False) -> None:
        self._files = files
        self._server = server
        self._stamp = files.stamp()
        self._context, self._used = files.context(server=server)

    def current(self) -> ssl.SSLContext:
        """The context for the next connection."""
        stamp = self._files.stamp()
        if stamp == self._stamp:
            return self._context
        self._stamp = stamp
        try:
            self._context, self._used = self._files.context(server=self._server)
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
        return self._context


@cache
def client_context(files: TlsFiles) -> TlsContext:
    """The context of this process's clients with these files: it remains what it was while files do not fit."""
    return TlsContext(files)
