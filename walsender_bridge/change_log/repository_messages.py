"""The actions of the metadata repository: their requests and answers. `LogClient` and `OperatorLog` say what they do."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from walsender_bridge.change_log.actions import Action, Empty
from walsender_bridge.change_log.protocol import StreamCut
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.runtime.error_record import ErrorRecord


@dataclass(frozen=True, slots=True)
class StatusAnswer:
    """See `LogStatus`."""

    log_id: str
    version: int
    forced_version: int
    streams: Mapping[str, StreamCut]
    faults: Mapping[str, ErrorRecord]


@dataclass(frozen=True, slots=True)
class CreateStreamRequest:
    """`stream`: its name, which is checked by the repository."""

    stream: str


@dataclass(frozen=True, slots=True)
class WriterTermRequest:
    """`stream`: the one to be written. `failed`: addresses of log servers at which its last writer failed."""

    stream: str
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WriterTermAnswer:
    """`term`: greater than any issued before. `addresses`: of the log servers to write to, all of them."""

    term: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BarrierRequest:
    """`positions`: end LSNs by stream. `timeout` in seconds."""

    positions: Mapping[str, Lsn]
    timeout: float


@dataclass(frozen=True, slots=True)
class BarrierAnswer:
    """`version`: the one that was forced; it can be read."""

    version: int


@dataclass(frozen=True, slots=True)
class RegisterConsumerRequest:
    """`version`: the last one that the consumer published; None: none yet."""

    name: str
    version: int | None
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class DropConsumerRequest:
    """`name`: of the consumer whose lease ends."""

    name: str


@dataclass(frozen=True, slots=True)
class RaiseVersionRequest:
    """`version`: the last one to be skipped."""

    version: int


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """A replica as the repository knows it. `version`: the highest one that it has durably. `in_sync`: commits need it.

    `failure`: why the last attempt to bring it in sync failed; None: none has since it was. Of one that does not answer: why
    what is at its address is not accepted.
    """

    log_server: str
    address: str
    answers: bool
    version: int
    in_sync: bool
    failure: ErrorRecord | None = None


@dataclass(frozen=True, slots=True)
class StreamDescription:
    """A stream's last commit, and what is published and may be trimmed of it.

    `version`, `end_offset`, `bytes_total`, `last_end_lsn`, `last_commit_time`: of the last commit that was issued and is not
    empty. `published_end`, `published_bytes`: of the newest version that can be read completely. `trim_limit`: the local
    offset below which no consumer needs the stream. `history`: commits that the repository keeps.
    """

    stream: str
    term: int
    version: int
    end_offset: int
    bytes_total: int
    last_end_lsn: Lsn
    last_commit_time: int
    published_end: int
    published_bytes: int
    trim_limit: int
    history: int
    replicas: tuple[ReplicaPlace, ...]


@dataclass(frozen=True, slots=True)
class NeededFrom:
    """Where a consumer still needs a stream from. `bytes_total`: in front of it; None: not known."""

    offset: int
    bytes_total: int | None


@dataclass(frozen=True, slots=True)
class ConsumerDescription:
    """A consumer with a lease. `version`: the last one that it published; None: none yet. `needs`: by stream."""

    name: str
    version: int | None
    lease_seconds: float
    needs: Mapping[str, NeededFrom]


@dataclass(frozen=True, slots=True)
class DescribeAnswer:
    """The whole state of the log, for operators. `version`: the newest one issued; `published`: that can be read completely.

    `next_global`: the next global offset. `retention`: seconds that entries are kept without a lease.
    """

    log_id: str
    version: int
    published: int
    forced_version: int
    next_global: int
    retention: float
    streams: tuple[StreamDescription, ...]
    consumers: tuple[ConsumerDescription, ...]
    faults: Mapping[str, ErrorRecord]


@dataclass(frozen=True, slots=True)
class TrimStreamRequest:
    """Trim a stream up to a version (None: the newest), and only what was committed longer ago than `older_than` seconds."""

    stream: str
    to_version: int | None
    older_than: float | None


@dataclass(frozen=True, slots=True)
class TrimmedReplica:
    """What a replica gave back: `entries`, their `bytes`, and `disk_bytes` of files. `error`: why it was not trimmed."""

    log_server: str
    address: str
    low_offset: int
    entries: int
    bytes: int
    disk_bytes: int
    error: ErrorRecord | None


@dataclass(frozen=True, slots=True)
class Holder:
    """A consumer whose lease holds what was not trimmed. `offset`: it needs the stream from there on."""

    consumer: str
    version: int | None
    offset: int
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class TrimStreamAnswer:
    """`up_to`: the local offset up to which was asked and allowed. `held_by`: whose leases hold the rest."""

    up_to: int
    replicas: tuple[TrimmedReplica, ...]
    held_by: tuple[Holder, ...]


STATUS: Final = Action("status", Empty, StatusAnswer, lambda _: ())
CREATE_STREAM: Final = Action("create_stream", CreateStreamRequest, StreamCut)
WRITER_TERM: Final = Action("writer_term", WriterTermRequest, WriterTermAnswer)
BARRIER: Final = Action("barrier", BarrierRequest, BarrierAnswer, lambda r: tuple(r.positions))
#: Readers of a single stream need a lease, too.
REGISTER_CONSUMER: Final = Action("register_consumer", RegisterConsumerRequest, Empty, lambda _: ())
DROP_CONSUMER: Final = Action("drop_consumer", DropConsumerRequest, Empty)
RAISE_VERSION: Final = Action("raise_version", RaiseVersionRequest, Empty)
DESCRIBE: Final = Action("describe", Empty, DescribeAnswer)
TRIM_STREAM: Final = Action("trim_stream", TrimStreamRequest, TrimStreamAnswer)
