"""Reads a stream of the change log from any of its replicas (`StreamReader`).

Safe on a Spark executor, as `client.py` is. Each call is sent to one replica; after an error that concerns that replica
(`replica_order.OF_A_REPLICA`) it is sent to the next. A read is a row of calls, one for each batch, so a replica that fails in
the middle costs one call: the next replica continues at the offset behind the last batch.

A log server that hangs is noticed by the timeout of a call, which does not include the time that the caller takes between
two batches. A batch may be an entry of 1 GiB, for which a slow network needs longer: if no replica has sent it in
`PATIENCE[0]` seconds, all of them are tried once more with `PATIENCE[1]`.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Self, TypeVar

from walsender_bridge.change_log.client import (
    READ_SECONDS,
    CutPoint,
    EntryBatch,
    LogEntry,
    ReplicaClient,
    ReplicaStatus,
    StreamCut,
    in_batches,
)
from walsender_bridge.change_log.replica_order import (
    OF_A_REPLICA,
    decisive,
    in_order,
    is_failure,
)
from walsender_bridge.errors import (
    BehindError,
    ConfigError,
    SilentError,
    TusklineError,
    UnavailableError,
)
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.runtime.closing import Closing

#: Seconds to wait for a batch of entries, at the first attempt and at the second.
PATIENCE: Final = (30.0, READ_SECONDS)

_T = TypeVar("_T")
#: When log servers failed last, by address, for all readers of this process: a Spark worker has a reader for each task.
_failed: dict[str, float] = {}


class StreamReader(Closing):
    """The entries, schemas and commits of one stream, from those of `addresses` that answer, tried in this order.

    `holds`: the offset up to which a replica has to be committed to be asked; a replica that is behind would answer with fewer
    commits than there are. `log_id`: of the log whose offsets these are; `read` raises `ConfigError` if another log answers.
    `timeout`: seconds for an action; `patience`: for a batch of entries, attempt by attempt.

    All methods raise the error of the last replica if none of them answers, `TrimmedError` only if all that answer have trimmed
    the entries.
    """

    def __init__(
        self,
        stream: str,
        addresses: Iterable[str],
        *,
        holds: int = 0,
        log_id: str | None = None,
        timeout: float = 10.0,
        patience: Sequence[float] = PATIENCE,
    ) -> None:
        self.stream = stream
        self.addresses = tuple(addresses)
        self.holds = holds
        self.log_id = log_id
        self._timeout = timeout
        self._patience = patience
        self._replicas: dict[str, ReplicaClient] = {}

    @classmethod
    def of(cls, cut: StreamCut, *, timeout: float = 10.0) -> Self:
        """A reader of everything below the cut."""
        return cls(cut.stream, cut.addresses, holds=cut.end_offset, timeout=timeout)

    def follow(self, cut: StreamCut) -> None:
        """Continue with a later cut of the stream, whose replicas may be others."""
        self.addresses, self.holds = cut.addresses, cut.end_offset
        for address in set(self._replicas) - set(cut.addresses):
            self._replicas.pop(address).close()

    def close(self) -> None:
        """Close the connections."""
        while self._replicas:
            self._replicas.popitem()[1].close()

    def _ask(
        self, call: Callable[[ReplicaClient, float], _T], patience: Sequence[float] | None = None
    ) -> _T:
        """The answer of the first replica that has one. Each of `patience` is a timeout for one attempt at all replicas."""
        errors: list[TusklineError] = []
        for seconds in patience or (self._timeout,):
            errors = []
            for address in in_order(self.addresses, _failed, time.monotonic()):
                try:
                    found = call(self._replica(address), seconds)
                except OF_A_REPLICA as error:
                    errors.append(error)
                    if is_failure(error):
                        _failed[address] = time.monotonic()
                else:
                    _failed.pop(address, None)
                    return found
            if not any(isinstance(error, SilentError) for error in errors):
                break
        if not errors:
            raise UnavailableError("no log server with a replica is known", where=self.stream)
        raise decisive(errors)

    def _replica(self, address: str) -> ReplicaClient:
        if address not in self._replicas:
            self._replicas[address] = ReplicaClient(address, timeout=self._timeout)
        return self._replicas[address]

    def status(self) -> ReplicaStatus:
        """See `ReplicaClient.stream_status`."""

        def status(replica: ReplicaClient, _: float) -> ReplicaStatus:
            found = replica.stream_status(self.stream)
            if found.committed_end < self.holds:
                raise BehindError(
                    f"the replica is committed up to offset {found.committed_end}, and {self.holds} is needed",
                    where=f"stream {self.stream}, {replica.address}",
                    repair="try again",
                )
            return found

        return self._ask(status)

    def read(
        self, from_offset: int, to_offset: int, relations: Sequence[str] | None = None
    ) -> Iterator[LogEntry]:
        """See `ReplicaClient.read`. Each entry is returned once, however many replicas fail."""
        return in_batches(
            lambda offset: self.read_batch(offset, to_offset, relations), from_offset, to_offset
        )

    def read_batch(
        self, from_offset: int, to_offset: int, relations: Sequence[str] | None = None
    ) -> EntryBatch:
        """See `ReplicaClient.read_batch`: what is read of the log at once, `protocol.READ_BATCH_BYTES` or one entry."""

        def batch(replica: ReplicaClient, seconds: float) -> EntryBatch:
            found = replica.read_batch(
                self.stream, from_offset, to_offset, relations, within=seconds
            )
            if self.log_id is not None and found.log_id != self.log_id:
                raise other_log(self.log_id, found.log_id, replica.address)
            return found

        return self._ask(batch, self._patience)

    def schemas(self, hashes: Iterable[bytes]) -> dict[bytes, bytes]:
        """See `ReplicaClient.schemas`."""
        wanted = [*hashes]
        return self._ask(lambda r, _: r.schemas(self.stream, wanted, holds=self.holds))

    def relations(self) -> list[bytes]:
        """See `ReplicaClient.relations`."""
        return self._ask(lambda r, _: r.relations(self.stream, holds=self.holds))

    def plan(
        self,
        after_offset: int,
        up_to_version: int,
        max_bytes: int | None = None,
        max_versions: int | None = None,
    ) -> list[CutPoint]:
        """See `ReplicaClient.plan`."""
        limits = after_offset, up_to_version, max_bytes, max_versions
        return self._ask(lambda r, _: r.plan(self.stream, *limits, holds=self.holds))

    def version_at(self, commit_time_us: int) -> CutPoint | None:
        """See `ReplicaClient.version_at`."""
        return self._ask(lambda r, _: r.version_at(self.stream, commit_time_us, holds=self.holds))

    def cut_before(self, version: int) -> CutPoint | None:
        """See `ReplicaClient.cut_before`."""
        return self._ask(lambda r, _: r.cut_before(self.stream, version, holds=self.holds))

    def list_transactions_after(
        self, timeline: int, lsn: Lsn, limit: int = 100
    ) -> list[tuple[Lsn, int, int]]:
        """See `ReplicaClient.list_transactions_after`."""
        return self._ask(
            lambda r, _: r.list_transactions_after(
                self.stream, timeline, lsn, limit, holds=self.holds
            )
        )


def other_log(known: str, found: str, where: str) -> ConfigError:
    """The error for a position of log `known` where log `found` answers."""
    return ConfigError(
        f"the position belongs to log {known}, but this is log {found}",
        where=where,
        repair="read the log of the checkpoint, or start with a new checkpoint",
    )
