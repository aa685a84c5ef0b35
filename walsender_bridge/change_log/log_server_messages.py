"""The actions of a log server: their requests and answers, and what accompanies the entries that are read and appended.

The repository uses the actions from REPORT to TRIM, `ReplicaClient` the others and CUT_TAIL, `OperatorReplica` also the last
two. `holds` of a request is the offset up to which a replica has to be committed to answer it (`BehindError`). Offsets are
local, and ends exclusive; times are microseconds since the Unix epoch. Schema records and their hashes are hexadecimal
(`unhex`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from walsender_bridge.change_log.actions import Action, Empty
from walsender_bridge.change_log.protocol import (
    CommitContext,
    CutPoint,
    IssuedCommit,
    ReplicaReport,
    ReplicaStatus,
)
from walsender_bridge.postgres.protocol.lsn import Lsn, WalPosition
from walsender_bridge.runtime.error_record import ErrorRecord


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """The ticket of DoGet: the first batch of the committed entries [from, to). `relations` ("schema.table", or an OID as text): None: all."""

    stream: str
    from_offset: int
    to_offset: int
    relations: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """The metadata of a batch of entries in DoGet: the log's id, where the next batch begins, and `protocol.places_crc`."""

    log_id: str
    next_offset: int
    places_crc: int


@dataclass(frozen=True, slots=True)
class AppendRequest:
    """The metadata of a batch of entries in DoPut. See `AppendWriter.send`."""

    confirm_to: WalPosition | None
    gate_lsn: Lsn
    system_id: int | None


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """An action on a stream that needs no more than its name."""

    stream: str


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """`log_server`: its id. `reports`: of its replicas that are not LEARNING."""

    log_server: str
    reports: tuple[ReplicaReport, ...]


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """`commits`: by stream, in order. `now`: the repository's steady time."""

    commits: Mapping[str, tuple[IssuedCommit, ...]]
    now: int


@dataclass(frozen=True, slots=True)
class CommitAnswer:
    """`reports`: of these streams' replicas, after the commits. `refused`: by stream, why a commit was not applied."""

    reports: tuple[ReplicaReport, ...]
    refused: Mapping[str, ErrorRecord]


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """A replica of a stream of this log."""

    stream: str
    log_id: str


@dataclass(frozen=True, slots=True)
class CutTailRequest:
    """`term`: of the writer. `end`: where the last commit ends."""

    stream: str
    term: int
    end: int


@dataclass(frozen=True, slots=True)
class SealRequest:
    """See `Replica.seal`."""

    stream: str
    end: int
    term: int
    version: int


@dataclass(frozen=True, slots=True)
class JoinedRequest:
    """See `Replica.joined`."""

    stream: str
    replaced_by: str


@dataclass(frozen=True, slots=True)
class SynchronizeRequest:
    """Have this log server synchronize the replica of the log server at `address`; see `synchronizer.synchronize`."""

    stream: str
    address: str
    throttled: bool


@dataclass(frozen=True, slots=True)
class TrimPointRequest:
    """See `HostedReplica.trim_point`."""

    stream: str
    up_to: int
    before_time: int
    now: int


@dataclass(frozen=True, slots=True)
class TrimPointAnswer:
    """`up_to`: the end of a commit; 1: there is none to trim."""

    up_to: int


@dataclass(frozen=True, slots=True)
class TrimRequest:
    """See `HostedReplica.trim`. `version`: see `Replica.trim`."""

    stream: str
    up_to: int
    version: int


@dataclass(frozen=True, slots=True)
class TrimAnswer:
    """`low_offset`: the first one retained."""

    low_offset: int


@dataclass(frozen=True, slots=True)
class SchemaRequest:
    """`hashes`: of the records wanted."""

    stream: str
    hashes: tuple[str, ...]
    holds: int = 0


@dataclass(frozen=True, slots=True)
class SchemaAnswer:
    """`schemas`: records by hash."""

    schemas: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RelationsRequest:
    """See `ReplicaClient.relations`."""

    stream: str
    holds: int = 0


@dataclass(frozen=True, slots=True)
class RelationsAnswer:
    """`schemas`: the newest record of each relation, ordered by name."""

    schemas: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """See `ReplicaClient.plan`."""

    stream: str
    after_offset: int
    up_to_version: int
    max_bytes: int | None
    max_versions: int | None
    holds: int = 0


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """`cuts`: in order."""

    cuts: tuple[CutPoint, ...]


@dataclass(frozen=True, slots=True)
class VersionAtRequest:
    """See `ReplicaClient.version_at`."""

    stream: str
    commit_time: int
    holds: int = 0


@dataclass(frozen=True, slots=True)
class CutBeforeRequest:
    """See `ReplicaClient.cut_before`."""

    stream: str
    version: int
    holds: int = 0


@dataclass(frozen=True, slots=True)
class CutAnswer:
    """`cut`: None if there is no such commit."""

    cut: CutPoint | None


@dataclass(frozen=True, slots=True)
class TransactionsRequest:
    """See `ReplicaClient.list_transactions_after`."""

    stream: str
    timeline: int
    lsn: Lsn
    limit: int
    holds: int = 0


@dataclass(frozen=True, slots=True)
class TransactionsAnswer:
    """`transactions`: (end LSN, xid, commit time), oldest first."""

    transactions: tuple[tuple[Lsn, int, int], ...]


@dataclass(frozen=True, slots=True)
class ReplicaDescription:
    """A replica in any state, for operators.

    `reason`: why it is LEARNING; `syncing_from`: the log server with which it is being synchronized, or for which it is being
    wiped; empty: with none, or it is damaged. `status`, `context`, `low_bytes`: None if they cannot be read; `low_bytes`: bytes of
    the stream in front of the low watermark. `sealed_at`, `replaced_by` (empty: None): see `Durable`. `disk_bytes`: of its files.
    """

    stream: str
    state: str
    reason: str
    syncing_from: str
    status: ReplicaStatus | None
    context: CommitContext | None
    sealed_at: int | None
    low_bytes: int | None
    disk_bytes: int
    replaced_by: str = ""


@dataclass(frozen=True, slots=True)
class ReplicasAnswer:
    """`log_server`: its id. `replicas`: all of them, ordered by stream."""

    log_server: str
    replicas: tuple[ReplicaDescription, ...]


@dataclass(frozen=True, slots=True)
class CommitsRequest:
    """The commits whose ends are greater than `after_offset`, at most `limit`."""

    stream: str
    after_offset: int
    limit: int


@dataclass(frozen=True, slots=True)
class CommitsAnswer:
    """`commits`: rows of the index in order, as arrays of their fields (`replica.commit_rows`), since there may be very many."""

    commits: tuple[tuple[int, ...], ...]


REPORT: Final = Action("report", Empty, ReportAnswer)
COMMIT: Final = Action("commit", CommitRequest, CommitAnswer, lambda r: tuple(r.commits))
CREATE: Final = Action("create", CreateRequest, ReplicaStatus)
CUT_TAIL: Final = Action("cut_tail", CutTailRequest, ReplicaStatus)
SEAL: Final = Action("seal", SealRequest, ReplicaStatus)
JOINED: Final = Action("joined", JoinedRequest, Empty)
#: Host a replica that has everything to learn, unless there is one: no other log server can have one made.
LEARN: Final = Action("learn", CreateRequest, Empty)
SYNCHRONIZE: Final = Action("synchronize", SynchronizeRequest, ReplicaStatus)
TRIM_POINT: Final = Action("trim_point", TrimPointRequest, TrimPointAnswer)
TRIM: Final = Action("trim", TrimRequest, TrimAnswer)
STREAM_STATUS: Final = Action("stream_status", StreamRequest, ReplicaStatus)
SCHEMA: Final = Action("schema", SchemaRequest, SchemaAnswer)
RELATIONS: Final = Action("relations", RelationsRequest, RelationsAnswer)
PLAN: Final = Action("plan", PlanRequest, PlanAnswer)
VERSION_AT: Final = Action("version_at", VersionAtRequest, CutAnswer)
CUT_BEFORE: Final = Action("cut_before", CutBeforeRequest, CutAnswer)
TRANSACTIONS: Final = Action("transactions", TransactionsRequest, TransactionsAnswer)
REPLICAS: Final = Action("replicas", Empty, ReplicasAnswer)
COMMITS: Final = Action("commits", CommitsRequest, CommitsAnswer)
