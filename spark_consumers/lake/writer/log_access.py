"""The change log as one lake's writer sees it: a connection that is opened when it is needed, and the lake's streams."""

from collections.abc import Collection
from dataclasses import replace

from walsender_bridge.change_log.client import LogClient, LogStatus
from walsender_bridge.errors import UnavailableError
from walsender_bridge.runtime import fail_point


class LogAccess:
    """The log at `address`, of which the lake follows `streams`. All methods raise the log's errors."""

    def __init__(self, address: str, streams: Collection[str]) -> None:
        self._address = address
        self._streams = frozenset(streams)
        self._client: LogClient | None = None

    @property
    def client(self) -> LogClient:
        """The connection; a new one after `close`."""
        if self._client is None:
            self._client = LogClient(self._address)
        return self._client

    def status(self) -> LogStatus:
        """The log's status, of this lake's streams only."""
        status = self.client.status()
        ours = {stream: cut for stream, cut in status.streams.items() if stream in self._streams}
        return replace(status, streams=ours)

    def raised(self, version: int) -> LogStatus:
        """The status, once every later commit of the log gets a version greater than this one.

        Raises `UnavailableError` while the log cannot be read up to there.
        """
        status = self.status()
        if status.version < version:
            self.client.raise_version(version)
            fail_point.hit("versions-skipped")
            status = self.status()
        if status.version < version:
            raise UnavailableError(
                f"the log skips the versions up to {version}, but can be read up to {status.version} only",
                where=self._address,
                repair="check that its log servers are running; it is retried",
            )
        return status

    def unchanged(self, before: LogStatus) -> None:
        """Raise `UnavailableError` if another log answers than the one that had this status."""
        log_id = self.client.status().log_id
        if log_id != before.log_id:
            raise UnavailableError(
                f"the log is {log_id}, but an epoch was being read from {before.log_id}",
                where=self._address,
                repair="no action is needed: the epoch is not published",
            )

    def close(self) -> None:
        """End the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None
