"""The change log's client for operators: the state of every replica and consumer, the index of commits, trimming.

As `client.py`, with what readers and writers have no use for.
"""

from collections.abc import Iterator

from walsender_bridge.change_log import log_server_messages as of_log_server
from walsender_bridge.change_log import repository_messages as of_repository
from walsender_bridge.change_log.actions import Empty
from walsender_bridge.change_log.client import LogClient, ReplicaClient
from walsender_bridge.change_log.replica import commit_rows
from walsender_bridge.change_log.replica.disk import IndexRow

#: Seconds for a trim, for which the repository asks each log server in turn.
_TRIMMING = 120.0
#: Rows of one answer.
_PAGE = 2000


class OperatorLog(LogClient):
    """The metadata repository."""

    def describe(self) -> of_repository.DescribeAnswer:
        """Streams with their replicas, consumers, and faults."""
        return self._call(of_repository.DESCRIBE, Empty())

    def trim_stream(
        self, stream: str, to_version: int | None, older_than: float | None
    ) -> of_repository.TrimStreamAnswer:
        """Trim what no consumer's lease holds; see `TrimStreamRequest`.

        Raises `UsageError` if a lease holds a part of what `to_version` names, or the version cannot be read yet.
        """
        request = of_repository.TrimStreamRequest(stream, to_version, older_than)
        return self._call(of_repository.TRIM_STREAM, request, within=_TRIMMING)


class OperatorReplica(ReplicaClient):
    """A log server's replicas."""

    def replicas(self) -> of_log_server.ReplicasAnswer:
        """All replicas, whatever their states."""
        return self._call(of_log_server.REPLICAS, Empty())

    def commits(self, stream: str, after_offset: int, end: int) -> Iterator[IndexRow]:
        """The commits that end beyond `after_offset`, up to the local offset `end`, in order. Raises `TrimmedError`."""
        while after_offset < end:
            request = of_log_server.CommitsRequest(stream, after_offset, _PAGE)
            answer = self._call(of_log_server.COMMITS, request)
            rows = [commit_rows.of_values(each) for each in answer.commits]
            if not rows or rows[-1].context.end <= after_offset:
                return
            for row in rows:
                if row.context.end > end:
                    return
                yield row
            after_offset = rows[-1].context.end
