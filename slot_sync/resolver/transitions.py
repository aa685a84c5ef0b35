"""What the resolver answers: states, reasons and actions, as values.

Safety: an action says everything that it needs, so that what carries it out decides nothing. Each may be carried
out late or not at all, or the process may end in the middle of it; the next poll sees what there is.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum


class CopyState(StrEnum):
    """Of one copy on one standby. `resolver.py` has the table of them."""

    MISSING = "MISSING"
    RESERVING = "RESERVING"
    PROVING = "PROVING"
    READY = "READY"
    LAGGING = "LAGGING"
    SUSPECT = "SUSPECT"
    INVALID = "INVALID"
    ORPHAN = "ORPHAN"
    CONFLICT = "CONFLICT"
    LEFTOVER = "LEFTOVER"
    BLOCKED = "BLOCKED"
    STALE_BACKUP = "STALE_BACKUP"
    KEPT_ELSEWHERE = "KEPT_ELSEWHERE"
    CLIENT_AHEAD = "CLIENT_AHEAD"
    SYNCED = "SYNCED"


#: A promotion now would lose nothing that the slot stands for.
SAFE = frozenset({CopyState.READY, CopyState.LAGGING})


class Reason(StrEnum):
    """Why a copy is in its state: one code a cause, stable for whoever reads `--json`."""

    # READY, LAGGING
    PROVEN = "proven"
    RENAME_CUT = "rename_cut"
    PROVEN_BEFORE = "proven_before"
    BEHIND = "behind"
    # SYNCED
    SYNCED_ONLY = "synced_only"
    # CLIENT_AHEAD
    CLIENT_AHEAD = "client_ahead"
    # MISSING
    NOT_MADE = "not_made"
    NO_SUCH_SLOT = "no_such_slot"
    NATIVE_PENDING = "native_pending"
    AHEAD_OF_STANDBY = "ahead_of_standby"
    # A server does not answer
    STANDBY_UNREACHABLE = "standby_unreachable"
    PRIMARY_UNREACHABLE = "primary_unreachable"
    NEVER_PROVEN = "never_proven"
    PROVEN_LONG_AGO = "proven_long_ago"
    # BLOCKED: how the servers are set up
    NOT_PRIMARY = "not_primary"
    PROMOTED = "promoted"
    OTHER_SYSTEM = "other_system"
    WAL_LEVEL = "wal_level"
    NO_EXTENSION = "no_extension"
    NO_SLOT_NAME = "no_slot_name"
    OTHER_SLOT_NAME = "other_slot_name"
    FEEDBACK_OFF = "feedback_off"
    NO_PHYSICAL_SLOT = "no_physical_slot"
    PHYSICAL_SLOT_LOST = "physical_slot_lost"
    CASCADING = "cascading"
    BEHIND_SAFEKEEPER = "behind_safekeeper"
    SLOT_BEING_MADE = "slot_being_made"
    # The link between them, which comes and goes
    NOT_STREAMING = "not_streaming"
    UPSTREAM_UNKNOWN = "upstream_unknown"
    OTHER_TIMELINE = "other_timeline"
    NO_WALSENDER = "no_walsender"
    NO_MARKER = "no_marker"
    NO_CATALOG_XMIN = "no_catalog_xmin"
    # What a copy lacks
    NOT_HEARD = "not_heard"
    RESERVED_LATER = "reserved_later"
    XMIN_BEHIND = "xmin_behind"
    XMIN_NOT_DECODED = "xmin_not_decoded"
    NO_SNAPSHOT = "no_snapshot"
    FOREIGN_SNAPSHOT = "foreign_snapshot"
    NO_MAPPINGS = "no_mappings"
    WAL_GONE = "wal_gone"
    NOT_REPLAYED = "not_replayed"
    DATABASE_PENDING = "database_pending"
    OTHER_INCARNATION = "other_incarnation"
    AHEAD = "ahead"
    FIELDS_DIFFER = "fields_differ"
    FAILOVER_DIFFERS = "failover_differs"
    NOT_SYNCHRONIZED = "not_synchronized"
    GIVES_WAY = "gives_way"
    INVALIDATED = "invalidated"
    NOT_PERSISTENT = "not_persistent"
    IDLE = "idle"
    OUTGROWN = "outgrown"
    LOST_ON_PRIMARY = "lost_on_primary"
    # Names
    GONE = "gone"
    DESELECTED = "deselected"
    NAME_TAKEN = "name_taken"
    FROM_A_BACKUP = "from_a_backup"
    OTHER_CONTROLLER = "other_controller"
    OLD_PRIMARY = "old_primary"
    UNPROVEN_NAME = "unproven_name"


#: Whether it is safe is not known: the answer is neither yes nor no.
UNDECIDED = frozenset(
    {
        Reason.STANDBY_UNREACHABLE,
        Reason.PROVEN_LONG_AGO,
        Reason.SYNCED_ONLY,
        Reason.OTHER_CONTROLLER,
    }
)


@dataclass(frozen=True)
class Nothing:
    """There is nothing to do."""


@dataclass(frozen=True)
class Wait:
    """What is awaited comes by itself, or an operator has to bring it: look again at the next poll."""


@dataclass(frozen=True)
class MarkIncarnation:
    """Write the marker of a slot, on the primary. That of a physical one has no copy's state as its subject."""

    slot: str
    value: str


@dataclass(frozen=True)
class Reserve:
    """Make a copy under a temporary name (`reserve`). Record the name first."""

    temporary_name: str
    database: str
    plugin: str
    restart_lsn: int
    confirmed_flush_lsn: int
    two_phase: bool
    two_phase_at: int | None


@dataclass(frozen=True)
class Advance:
    """Move a copy by decoding (`advance`), up to `to_lsn`."""

    name: str
    database: str
    to_lsn: int


@dataclass(frozen=True)
class SetFields:
    """Set the three fields of a copy (`set_fields`): to those of the primary's slot; or `catalog_xmin` alone, back."""

    name: str
    database: str
    restart_lsn: int
    confirmed_flush_lsn: int
    catalog_xmin: int
    may_go_back: bool = False


@dataclass(frozen=True)
class SetFailover:
    """Give a copy the `failover` of its slot (`set_failover`, 17+)."""

    name: str
    database: str
    failover: bool


@dataclass(frozen=True)
class RestoreMappings:
    """Have the mapping files of rewritten catalogs there that a slot may need (`restore_mappings`); the slot stays as it is."""

    name: str
    database: str


@dataclass(frozen=True)
class Rename:
    """Give a proven copy its real name (`rename`). Record that it was begun first."""

    temporary_name: str
    name: str
    database: str


@dataclass(frozen=True)
class Drop:
    """Drop a copy that we made (`drop`); `on_primary`: that the primary has from when it was a standby.

    `any_slot`: one that was not made by `reserve`, an old primary's own.
    """

    name: str
    database: str
    on_primary: bool = False
    any_slot: bool = False


Action = (
    Nothing
    | Wait
    | MarkIncarnation
    | Reserve
    | Advance
    | SetFields
    | SetFailover
    | RestoreMappings
    | Rename
    | Drop
)


@dataclass(frozen=True)
class Transition:
    """What one copy is found in now, why, and what is to be done about it."""

    #: The name of the slot on the primary; of a slot that nobody expected, its own; for `MarkIncarnation`, the physical slot's.
    slot: str
    #: The state that was remembered; "" if there was none.
    before: str
    after: CopyState
    reason: Reason
    #: One sentence for a person.
    why: str
    _: KW_ONLY
    #: What a person can do about it; "" where nothing is to be done.
    repair: str = ""
    #: What it was decided from, by name. LSNs, xids and times as integers (`observed.py`).
    evidence: Mapping[str, object] = field(default_factory=dict)
    action: Action = Nothing()
    #: The candidate is not ready while this is not safe. False: it is of a slot that nobody expects there.
    counts: bool = True
    #: What the state does not cover, since it could not be verified.
    not_known: tuple[str, ...] = ()
    #: It is not proven, but the operator has accepted it as safe (`ReadinessTerms.accept_native`).
    accepted: bool = False

    @property
    def safe(self) -> bool:
        """A promotion at the moment of the sample would lose nothing that the slot stands for."""
        return self.after in SAFE or self.accepted

    @property
    def undecided(self) -> bool:
        """It may be safe or not."""
        return not self.safe and self.reason in UNDECIDED
