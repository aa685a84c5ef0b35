"""What a proposer and a safekeeper say to each other (`frames.py` has the bytes).

    proposer                                safekeeper
    ProposerGreeting ──────────────────────▶            who I am, which server
                     ◀────────────────────── SafekeeperGreeting
    Vote(NodeId)     ──────────────────────▶            persisted, then
                     ◀────────────────────── VoteReply  what it holds *after* the vote (rule 1)
    Elected          ──────────────────────▶            zero the tail, fsync, persist the history, then
                     ◀────────────────────── AppendAck
    Append + WAL     ──────────────────────▶            written, fsynced, then
                     ◀────────────────────── AppendAck

After a short disconnection of the same process `Resume` stands for Vote (rule 5). `Refused` ends a
connection and says why. One connection keeps the order of its messages; nothing else is assumed of it: it
may break anywhere and lose what is on the way.

A message is a frozen value. WAL bytes are not part of one: `Append` and `Fetched` tell the range, and the
bytes follow their header on the wire. LSNs are bytes, `length` is bytes, identities are 128-bit numbers.
"""

from dataclasses import dataclass
from enum import IntEnum

from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.history import History
from walsender_bridge.quorum.protocol.value import value


@dataclass(frozen=True, slots=True)
class NodeId:
    """One election: its term, and the proposer that it is for, whose UUID is drawn at each start.

    A vote compares terms alone (rule 2), so there is no order of NodeIds; an equal one is the same process.
    """

    term: int = 0
    proposer: int = 0

    def __str__(self) -> str:
        text = f"{self.proposer:032x}"
        uuid = "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
        return f"term {self.term} of proposer {uuid}"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Whose WAL it is. Two ends with different ones have nothing to say to each other."""

    system_id: int = 0
    major: int = 0
    segment_size: int = 0


class Purpose(IntEnum):
    """What an election is for, as far as the fence of a failover is concerned."""

    ATTACH = 1  # a primary's WAL
    FAILOVER = 2  # no primary: fence the timeline that stands
    ABORT = 3  # take the fence back: the old primary goes on


class Refusal(IntEnum):
    """Why a safekeeper refused."""

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


@dataclass(frozen=True, slots=True)
class HotStandbyFeedback:
    """The oldest transactions that a safekeeper's readers still see (PostgreSQL docs, 53.4), 0 for none."""

    xmin: int = 0
    xmin_epoch: int = 0
    catalog_xmin: int = 0
    catalog_xmin_epoch: int = 0


# -- both greet -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProposerGreeting:
    """The first message of a connection. `quorum`: the id of the proposer's; 0: it has none yet, or only asks."""

    server: ServerInfo
    proposer: int
    quorum: int = 0


@dataclass(frozen=True, slots=True)
class SafekeeperGreeting:
    """Its answer. `flush_lsn` is for information: it may move until the vote (rule 1).

    `timeline` is that of the last epoch that counts, 0 for an empty log. `fenced_timeline`: a failover refuses it
    and older ones; 0 for none.
    """

    safekeeper: int
    server: ServerInfo
    node_id: NodeId
    configuration: Configuration
    flush_lsn: int
    commit_lsn: int
    timeline: int
    fenced_timeline: int = 0


# -- elections --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Vote:
    """Asks for a vote: never to take an older proposer's WAL again. `timeline` is the primary's."""

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
    """The vote is persisted (or the resumption accepted), and this is what is held after it.

    `flush_lsn` and `commit_lsn` end at a complete record (rule 9), except in the answer to a Resume of a
    safekeeper that is in the proposer's epoch already (`history.latest_election_epoch == node_id.term`): its log is
    the proposer's own, to the byte. `begin_lsn`: the oldest WAL held.
    """

    node_id: NodeId
    flush_lsn: int
    commit_lsn: int
    restart_lsn: int
    begin_lsn: int
    history: History
    configuration: Configuration


@dataclass(frozen=True, slots=True)
class Elected:
    """The proposer of `term` has its quorum: take its history, and its WAL from `start_lsn`.

    `start_lsn` is the divergence point, unless `rebuild`: then the WAL from the safekeeper's own end is to be
    had nowhere any more (or it is new and has none), and its log begins anew at `start_lsn`, which is not
    above `commit_lsn`.

    `ancestors`: the timelines before the source's, oldest first, and where each was left, as far as it knows: the history
    does not reach back to all of them.
    """

    term: int
    start_lsn: int
    commit_lsn: int
    rebuild: bool
    history: History
    configuration: Configuration
    ancestors: tuple[tuple[int, int], ...] = ()


# -- WAL --------------------------------------------------------------------------------------------


@value
class Append:
    """`length` bytes of WAL from `begin_lsn`, and how far the quorum and everybody are. 0: a heartbeat."""

    term: int
    begin_lsn: int
    commit_lsn: int
    restart_lsn: int
    length: int


@value
class AppendAck:
    """On disk up to `flush_lsn`. `feedback`: None when it is as it was."""

    term: int
    flush_lsn: int
    commit_lsn: int
    feedback: HotStandbyFeedback | None = None


#: The most that one Fetch may ask for, in bytes: the answer waits in the safekeeper's memory.
MAX_FETCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Fetch:
    """Asks the voter for the WAL of [begin_lsn, end_lsn), committed or not, to hand it to others.

    At most `MAX_FETCH_BYTES`. With both 0 it asks what is held: an earlier version says nothing to that.
    """

    term: int
    begin_lsn: int
    end_lsn: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """`length` bytes of WAL from `begin_lsn` follow: the answer to Fetch, in as many pieces as it takes."""

    term: int
    begin_lsn: int
    length: int


@dataclass(frozen=True, slots=True)
class Held:
    """The answer to an empty Fetch: what WAL is held, and what of the older WAL is wanted.

    `begin_lsn`: the oldest WAL held. `wanted_lsn`: it would keep WAL from here on; not below `begin_lsn` when it
    lacks none. `next_lsn`: where the next `CatchUpWal` begins; 0: none is taken now.
    """

    term: int
    begin_lsn: int
    wanted_lsn: int
    next_lsn: int


@value
class CatchUpWal:
    """`length` bytes of WAL from `begin_lsn` on, below all that the safekeeper holds, follow. It answers with Held.

    `timeline`: that of the segment's last byte, which names its file. Sent only to who has answered with Held before.
    """

    term: int
    begin_lsn: int
    timeline: int
    length: int


# -- membership, and the end ------------------------------------------------------------------------


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
    """Why the connection ends. `node_id`: whom the safekeeper has voted for."""

    reason: Refusal
    node_id: NodeId
    detail: str = ""


ToSafekeeper = ProposerGreeting | Vote | Resume | Elected | Append | Fetch | CatchUpWal | Configure
ToProposer = SafekeeperGreeting | VoteReply | AppendAck | Fetched | Configured | Refused
Message = ToSafekeeper | ToProposer | Held
