"""The messages between a proposer and a safekeeper (`frames.py` has the bytes).

    proposer                                safekeeper
    ProposerGreeting ──────────────────────▶            identity, server, quorum
                     ◀────────────────────── SafekeeperGreeting
    Vote(NodeId)     ──────────────────────▶            persisted, then
                     ◀────────────────────── VoteReply  what it holds *after* the vote (rule 1)
    Elected          ──────────────────────▶            zero the tail, fsync, persist the history, then
                     ◀────────────────────── AppendAck
    Append + WAL     ──────────────────────▶            written, fsynced, then
                     ◀────────────────────── AppendAck

After a disconnection of the same process `Resume` replaces Vote (rule 5). `Refused` ends a connection, with the reason.
A connection keeps the order of its messages; nothing else is assumed of it: it may break anywhere and lose what is under
way.

A message is a frozen value. WAL bytes are not part of it: `Append` and `Fetched` name the range, and the bytes follow
their header on the wire. LSNs are bytes, `length` is bytes, identities are 128-bit numbers.
"""

from dataclasses import dataclass
from enum import IntEnum

from walsender_bridge.postgres.protocol.lsn import Lsn, WalPosition
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.history import History
from walsender_bridge.quorum.protocol.value import value


@dataclass(frozen=True, slots=True)
class NodeId:
    """One campaign: its term, and its proposer, whose UUID is drawn at each start.

    A vote compares terms only (rule 2), so NodeIds have no order; equal ones are the same process.
    """

    term: int = 0
    proposer: int = 0

    def __str__(self) -> str:
        text = f"{self.proposer:032x}"
        uuid = "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
        return f"term {self.term} of proposer {uuid}"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server whose WAL it is. A proposer and a safekeeper with different ones cannot cooperate."""

    system_id: int = 0
    major: int = 0
    segment_size: int = 0


class Purpose(IntEnum):
    """The purpose of an election with respect to a failover's fence."""

    ATTACH = 1  # a primary's WAL
    FAILOVER = 2  # no primary: fence the current timeline
    ABORT = 3  # lift the fence: the old primary continues


class Refusal(IntEnum):
    """A safekeeper's reason to refuse."""

    OLDER_TERM = 1
    OTHER_SYSTEM = 2
    OTHER_MAJOR = 3
    OTHER_SEGMENT_SIZE = 4
    NOT_A_MEMBER = 5
    FENCED_TIMELINE = 6
    OLDER_TIMELINE = 7
    DIVERGED = 8
    OUT_OF_ORDER = 9
    DISK_FULL = 10
    OTHER_QUORUM = 11
    NOT_ALLOWED = 12  # by the certificate's roles


@dataclass(frozen=True, slots=True)
class HotStandbyFeedback:
    """The oldest transactions that a safekeeper's readers still need (PostgreSQL docs, 53.4), 0 for none."""

    xmin: int = 0
    xmin_epoch: int = 0
    catalog_xmin: int = 0
    catalog_xmin_epoch: int = 0


# -- greetings --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProposerGreeting:
    """The first message of a connection. `quorum`: the proposer's; 0: it has none yet, or only queries."""

    server: ServerInfo
    proposer: int
    quorum: int = 0


@dataclass(frozen=True, slots=True)
class SafekeeperGreeting:
    """The answer. `flush_lsn` is for information: it may move until the vote (rule 1).

    `timeline` is that of the last history entry that counts, 0 for an empty log. `fenced_timeline`: a failover's fence
    refuses it and older ones; 0 for none.
    """

    safekeeper: int
    server: ServerInfo
    node_id: NodeId
    configuration: Configuration
    flush_lsn: Lsn
    commit_lsn: Lsn
    timeline: int
    fenced_timeline: int = 0


# -- elections --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Vote:
    """Requests a vote, which promises to take no older proposer's WAL. `timeline` is the primary's."""

    node_id: NodeId
    purpose: Purpose
    timeline: int
    configuration: Configuration


@dataclass(frozen=True, slots=True)
class Resume:
    """The process of this NodeId is back: older connections of it are dead."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class VoteReply:
    """The vote is persisted (or the resumption accepted), and this is what the safekeeper holds after it.

    `flush_lsn` and `commit_lsn` end at a complete record (rule 9), except in the answer to a Resume of a
    safekeeper that is already in the proposer's election epoch (`history.latest_election_epoch == node_id.term`): its log is
    the proposer's own, to the byte. `begin_lsn`: the oldest WAL held.
    """

    node_id: NodeId
    flush_lsn: Lsn
    commit_lsn: Lsn
    restart_lsn: Lsn
    begin_lsn: Lsn
    history: History
    configuration: Configuration


@dataclass(frozen=True, slots=True)
class Elected:
    """The proposer of `term` has its quorum: adopt its history, and its WAL from `start_lsn`.

    `start_lsn` is the divergence point, unless `rebuild`: then the WAL from the safekeeper's own end is no longer available
    (or the safekeeper is new), and it does a full resync at `start_lsn`, which is not above `commit_lsn`.

    `ancestors`: the timelines before the source's, oldest first, and their switch points, as far as the source knows them:
    the history does not reach back to all of them.
    """

    term: int
    start_lsn: Lsn
    commit_lsn: Lsn
    rebuild: bool
    history: History
    configuration: Configuration
    ancestors: tuple[WalPosition, ...] = ()


# -- WAL --------------------------------------------------------------------------------------------


@value
class Append:
    """`length` bytes of WAL from `begin_lsn`, and the quorum's positions. 0: a heartbeat."""

    term: int
    begin_lsn: Lsn
    commit_lsn: Lsn
    restart_lsn: Lsn
    length: int


@value
class AppendAck:
    """WAL is on disk up to `flush_lsn`. `feedback`: None when it has not changed."""

    term: int
    flush_lsn: Lsn
    commit_lsn: Lsn
    feedback: HotStandbyFeedback | None = None


#: The most bytes that one Fetch may request: the answer waits in the safekeeper's memory.
MAX_FETCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Fetch:
    """Requests the WAL of [begin_lsn, end_lsn) from a voter, committed or not, for another safekeeper.

    At most `MAX_FETCH_BYTES`. With both 0 it requests `Held`: an earlier version does not answer that.
    """

    term: int
    begin_lsn: Lsn
    end_lsn: Lsn


@dataclass(frozen=True, slots=True)
class Fetched:
    """`length` bytes of WAL from `begin_lsn` follow: the answer to Fetch, in as many pieces as it takes."""

    term: int
    begin_lsn: Lsn
    length: int


@dataclass(frozen=True, slots=True)
class Held:
    """The answer to an empty Fetch: the WAL held, and the older WAL requested.

    `begin_lsn`: the oldest WAL held. `wanted_lsn`: WAL should be kept from here on; not below `begin_lsn` when none is
    missing. `next_lsn`: the start of the next `CatchUpWal`; 0: none is accepted now.
    """

    term: int
    begin_lsn: Lsn
    wanted_lsn: Lsn
    next_lsn: Lsn


@value
class CatchUpWal:
    """`length` bytes of WAL from `begin_lsn` on follow, below all WAL that the safekeeper holds. It answers with Held.

    `timeline`: that of the segment's last byte, which is part of the file name. Sent only after a Held was received.
    """

    term: int
    begin_lsn: Lsn
    timeline: int
    length: int


# -- membership, refusals ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Configure:
    """The proposer of `term` changes the membership."""

    term: int
    configuration: Configuration


@dataclass(frozen=True, slots=True)
class Configured:
    """The configuration of this generation is persisted."""

    term: int
    generation: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The reason why the connection ends. `node_id`: the safekeeper's vote."""

    reason: Refusal
    node_id: NodeId
    detail: str = ""


ToSafekeeper = ProposerGreeting | Vote | Resume | Elected | Append | Fetch | CatchUpWal | Configure
ToProposer = SafekeeperGreeting | VoteReply | AppendAck | Fetched | Configured | Refused
Message = ToSafekeeper | ToProposer | Held
