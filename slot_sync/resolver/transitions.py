"""The resolver's output: states, reasons and actions, as values.

Safety: an action contains everything that it needs, so that the code that carries it out decides nothing. Each may be
carried out late or not at all, or the process may end in the middle of it; the next poll starts from what exists.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum

from walsender_bridge.postgres.protocol.lsn import Lsn


class CopyState(StrEnum):
    """The state of one copy on one standby; see the table in `resolver.py`."""

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
    """Why a copy is in its state: one code for each cause, stable for readers of `--json`."""

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
    NOT_CREATED = "not_created"
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
    SLOT_BEING_CREATED = "slot_being_created"
    # The link between them, which may break and return
    NOT_STREAMING = "not_streaming"
    UPSTREAM_UNKNOWN = "upstream_unknown"
    OTHER_TIMELINE = "other_timeline"
    NO_WALSENDER = "no_walsender"
    NO_INCARNATION_ID = "no_incarnation_id"
    NO_CATALOG_XMIN = "no_catalog_xmin"
    # Failed conditions of a copy
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


#: Reasons with which it is not known whether the copy is safe: the verdict is neither yes nor no.
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
    """The missing condition comes by itself or needs an operator: check again at the next poll."""


@dataclass(frozen=True)
class MarkIncarnation:
    """Write the incarnation id of a slot, on the primary. For a physical slot the transition is not of a copy."""

    slot: str
    value: str


@dataclass(frozen=True)
class Reserve:
    """Create a copy under a temporary name (`reserve`). The name is recorded first."""

    temporary_name: str
    database: str
    plugin: str
    restart_lsn: Lsn
    confirmed_flush_lsn: Lsn
    two_phase: bool
    two_phase_at: Lsn | None


@dataclass(frozen=True)
class Advance:
    """Move a copy by decoding (`advance`), up to `to_lsn`."""

    name: str
    database: str
    to_lsn: Lsn


@dataclass(frozen=True)
class SetFields:
    """Set the three fields of a copy (`set_fields`): to those of the primary's slot; or `catalog_xmin` alone, back."""

    name: str
    database: str
    restart_lsn: Lsn
    confirmed_flush_lsn: Lsn
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
    """Restore the mapping files of rewritten catalogs that a slot may need (`restore_mappings`); the slot stays as it is."""

    name: str
    database: str


@dataclass(frozen=True)
class Rename:
    """Give a proven copy its real name (`rename`). Its start is recorded first."""

    temporary_name: str
    name: str
    database: str


@dataclass(frozen=True)
class Drop:
    """Drop a copy that we created (`drop`). `on_primary`: one that the primary has since it was a standby.

    `any_slot`: one that `reserve` did not create, an old primary's own.
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
    """The state of one copy, its reason, and the next action."""

    #: The name of the slot on the primary; of an unexpected slot, its own; for `MarkIncarnation`, the physical slot's.
    slot: str
    #: The recorded state; "" if there was none.
    before: str
    after: CopyState
    reason: Reason
    #: The explanation, one sentence.
    why: str
    _: KW_ONLY
    #: The hint: what an operator can do; "" where nothing is to be done.
    repair: str = ""
    #: What it was decided from, by name. LSNs, xids and times as integers (`observed.py`).
    evidence: Mapping[str, object] = field(default_factory=dict)
    action: Action = Nothing()
    #: The candidate is not ready while this is not safe. False: the slot is not selected.
    counts: bool = True
    #: What could not be verified, so that the state does not cover it.
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
