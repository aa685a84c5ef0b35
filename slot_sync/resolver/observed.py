"""What the resolver is told: a primary's slots, a standby's copies, and what we remember of the standby.

Everything here is a value. An LSN is an `int` (bytes, `walsender_bridge.postgres.protocol.lsn`), a transaction is PostgreSQL's
32-bit `xid` as an `int`, a time is an `int` of microseconds since 1970 by the clock of the server that it comes
from. `None` is SQL's NULL, or what that major does not have. Slots are told by name; a name never means two slots
of one server.

How to sample, since the safety argument (`conditions.py`) rests on the order:

1. the primary: its walsenders, then its physical slots, then its logical ones (three statements on one connection;
   a reply counted too early is only slow, one counted too late is a false proof);
2. then the standby: its settings, then its slots, then its clock and `flush_lsn`.

A verdict speaks of the moment at which the primary was sampled.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

#: A slot under such a name is being proven (`TEMPORARY_PREFIX` of the extension).
TEMPORARY_PREFIX = "_tuskline_tmp_"


@dataclass(frozen=True)
class LogicalSlot:
    """A logical slot of the primary: a row of pg_replication_slots, with `inspect` for what that view lacks."""

    name: str
    plugin: str
    #: The name of its database on this server.
    database: str
    restart_lsn: int | None
    confirmed_flush_lsn: int | None
    catalog_xmin: int | None
    two_phase: bool = False
    #: Where two_phase began (14+); 0 where that is left empty (18), `None` where two_phase is off.
    two_phase_at: int | None = None
    #: A session's own slot, which ends with it: ignored.
    temporary: bool = False
    #: Asked to be kept by PostgreSQL itself (17+).
    failover: bool = False
    active_pid: int | None = None
    #: reserved, extended, unreserved or lost (13+).
    wal_status: str | None = None
    #: Why it can no longer be used, in the words of 18 (`inspect` says so on every major); `None`: it can.
    invalidation: str | None = None
    #: The oid of its database, which a renamed one keeps.
    datoid: int = 0
    #: The incarnation of the slot, as `mark` wrote it, or `reserve` before this server was promoted; `None`: it has none yet.
    marker: str | None = None


@dataclass(frozen=True)
class PhysicalSlot:
    """A physical slot of the primary, with the walsender that uses it, if one does."""

    name: str
    restart_lsn: int | None
    xmin: int | None
    catalog_xmin: int | None
    #: The incarnation of the slot, as `mark` wrote it. It goes with the slot and outlives a crash.
    marker: str | None
    #: The walsender's process; `None`: nobody streams from the slot.
    active_pid: int | None = None
    #: When that process began (pg_stat_replication.backend_start), by the primary's clock.
    backend_start: int | None = None
    #: pg_stat_replication.reply_time of that walsender (12+): when the standby sent its last reply, by the
    #: *standby's* clock.
    reply_time: int | None = None
    #: pg_stat_replication.flush_lsn of that walsender.
    flush_lsn: int | None = None
    wal_status: str | None = None
    invalidation: str | None = None


@dataclass(frozen=True)
class ObservedPrimary:
    """The server that the logical slots are kept from, at one moment."""

    #: pg_control_system().system_identifier
    system_id: int
    #: The timeline that it writes (or replays).
    timeline: int
    in_recovery: bool
    #: pg_postmaster_start_time()
    postmaster_start: int
    #: server_version_num, 150018 for 15.18.
    version: int
    wal_level: str
    #: The end of its WAL, written or not: pg_current_wal_insert_lsn().
    wal_lsn: int
    logical_slots: tuple[LogicalSlot, ...] = ()
    physical_slots: tuple[PhysicalSlot, ...] = ()
    #: The functions of the extension are there; without them markers and `two_phase_at` are not known.
    has_extension: bool = True
    #: By oid, the xmin of each database's row in pg_database: another one after each ALTER DATABASE.
    databases: Mapping[int, int] = field(default_factory=dict)
    #: Those that a session has locked, as ALTER DATABASE SET TABLESPACE does until it has written its last record.
    locked_databases: frozenset[int] = frozenset()

    def logical(self, name: str) -> LogicalSlot | None:
        """The logical slot of that name that is not a session's own."""
        return self._logical.get(name)

    def physical(self, name: str) -> PhysicalSlot | None:
        """The physical slot of that name."""
        return self._physical.get(name)

    @cached_property
    def _logical(self) -> Mapping[str, LogicalSlot]:
        return {slot.name: slot for slot in self.logical_slots if not slot.temporary}

    @cached_property
    def _physical(self) -> Mapping[str, PhysicalSlot]:
        return {slot.name: slot for slot in self.physical_slots}


@dataclass(frozen=True)
class Upstream:
    """The server that a walreceiver streams from, as that server itself said when it was asked.

    It is asked at pg_stat_wal_receiver's sender_host and sender_port. That is what tells a standby of the primary
    from one behind another standby or a safekeeper: slot names may be the same on both.
    """

    system_id: int
    in_recovery: bool
    postmaster_start: int


@dataclass(frozen=True)
class SafekeeperUpstream:
    """What a walreceiver streams from is a safekeeper, at this address: it has WAL and slots, and is no PostgreSQL."""

    where: str


@dataclass(frozen=True)
class SlotCopy:
    """A slot of the standby, as `tuskline_slots.inspect` tells it. Whether it is a copy is what is decided here."""

    name: str
    #: `None` for a physical slot.
    plugin: str | None
    database: str | None
    #: persistent, ephemeral or temporary.
    persistency: str
    restart_lsn: int | None
    confirmed_flush_lsn: int | None
    catalog_xmin: int | None
    #: What the server holds rows by, which is what it tells its upstream.
    effective_catalog_xmin: int | None
    active_pid: int | None = None
    two_phase: bool = False
    two_phase_at: int | None = None
    #: Kept by PostgreSQL's own slot synchronization (17+).
    synced: bool = False
    #: What it is for PostgreSQL's own slot synchronization after a promotion (17+).
    failover: bool = False
    #: Why it can no longer be used, in the words of 18; `None`: it can.
    invalidation: str | None = None
    #: The file pg_logical/snapshots/<restart_lsn>.snap is there. `None` without a restart_lsn.
    snapshot_present: bool | None = None
    #: That file was written by `advance`, whose decoder leaves nothing out.
    snapshot_complete: bool | None = None
    #: There is one for a later position that was not.
    foreign_snapshot_after: bool | None = None
    #: WAL from restart_lsn on is there, without a gap. `None` without a restart_lsn.
    wal_present: bool | None = None
    #: All mapping files of rewritten catalogs that a decoder may need are there, and restartpoints leave them.
    mappings_complete: bool | None = None
    #: The temporary name under which `reserve` made it. `None`: it was not made so.
    marker: str | None = None
    #: Since when nobody has had it in use, by the standby's clock (17+); `None`: somebody has, or it is not known.
    inactive_since: int | None = None
    #: The oid of its database.
    datoid: int = 0

    @property
    def has_temporary_name(self) -> bool:
        """It is under a name that no client uses, since nobody has proven it."""
        return self.name.startswith(TEMPORARY_PREFIX)


@dataclass(frozen=True)
class ObservedStandby:
    """A failover candidate at one moment."""

    system_id: int
    #: The timeline that it replays; on a server that has been promoted, the one that it writes.
    timeline: int
    in_recovery: bool
    postmaster_start: int
    version: int
    wal_level: str
    #: pg_conf_load_time(): changes with every reload. Each process has its own, and a new connection the
    #: postmaster's; a change without a reload costs one needless proof.
    conf_load_time: int
    #: clock_timestamp(), read after the slots.
    clock: int
    hot_standby_feedback: bool
    #: Seconds; with 0 the standby sends no feedback, whatever hot_standby_feedback says.
    wal_receiver_status_interval: int
    #: `None` or empty: it streams without a slot.
    primary_slot_name: str | None
    #: pg_stat_wal_receiver.status; `None` without a walreceiver.
    walreceiver_status: str | None
    #: pg_stat_wal_receiver.slot_name: what it streams by now.
    walreceiver_slot_name: str | None
    #: When the walreceiver's process began (pg_stat_activity.backend_start), by the standby's clock.
    walreceiver_start: int | None
    #: Who it streams from; `None` if it streams from nobody, or nobody answered there.
    upstream: Upstream | SafekeeperUpstream | None
    #: pg_last_wal_replay_lsn()
    replay_lsn: int
    #: What it has on disk: pg_last_wal_receive_lsn(), at least `replay_lsn`.
    flush_lsn: int
    #: Slots of every kind, under every name.
    slots: tuple[SlotCopy, ...] = ()
    #: The library and the functions of the extension are there. Without them only native copies are judged.
    has_extension: bool = True
    #: The physical slot that the configuration says it streams from; `None`: it says nothing. Whoever streams from
    #: another one is another standby.
    configured_slot: str | None = None
    #: It has replayed WAL that it did not receive from its upstream: from an archive.
    replays_archive: bool = False
    #: The WAL that a checkpoint leaves to slots (max_slot_wal_keep_size, 13+), in whole segments; `None`: all that they need.
    slot_wal_segments: int | None = None
    #: wal_segment_size, in bytes.
    segment_bytes: int = 16 * 1024 * 1024
    #: idle_replication_slot_timeout (18+), in microseconds; 0: none.
    idle_timeout: int = 0
    #: sync_replication_slots (17+): PostgreSQL makes copies of slots with `failover` itself.
    native_sync: bool = False
    #: `ObservedPrimary.databases`, as far as it has replayed.
    databases: Mapping[int, int] = field(default_factory=dict)

    def outgrown(self, copy: SlotCopy) -> bool:
        """The copy needs older WAL than max_slot_wal_keep_size allows: the next checkpoint invalidates it.

        A checkpoint counts segments, not bytes (`KeepLogSeg` in xlog.c). One more is what a promotion may begin itself.
        """
        if self.slot_wal_segments is None or copy.restart_lsn is None:
            return False
        needed = self.flush_lsn // self.segment_bytes - copy.restart_lsn // self.segment_bytes
        return needed + 1 > self.slot_wal_segments

    def idle_share(self, copy: SlotCopy) -> float:
        """Which part of idle_replication_slot_timeout the copy has been idle for: from 1 on a checkpoint invalidates it.

        A promotion ends with one. PostgreSQL spares its own copies in recovery, and counts anew for them after it.
        """
        if not self.idle_timeout or copy.synced or copy.inactive_since is None:
            return 0.0
        return (self.clock - copy.inactive_since) / self.idle_timeout

    def slot(self, name: str) -> SlotCopy | None:
        """The slot of that name."""
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> Mapping[str, SlotCopy]:
        return {slot.name: slot for slot in self.slots}


@dataclass(frozen=True)
class FeedbackEpochKey:
    """What says that the physical slot's reservation has not been interrupted: `feedback_epoch.py` has the argument.

    Two polls with equal keys are of one epoch. Values of the slot are not in it: they can come back.
    """

    system_id: int
    timeline: int
    primary_start: int
    physical_slot: str
    marker: str
    walsender_pid: int
    walsender_start: int
    conf_load_time: int


@dataclass(frozen=True)
class Sighting:
    """When a copy was first seen on the standby, in what the standby tells its upstream in order."""

    #: The standby's clock, just after the copy was seen there.
    clock: int
    #: What the standby had on disk just then.
    flush_lsn: int


@dataclass(frozen=True)
class Reserved:
    """Where a copy stood before it was ever advanced. Its catalog_xmin was chosen then, and not by a decoder."""

    restart_lsn: int
    catalog_xmin: int


@dataclass(frozen=True)
class SlotPosition:
    """Where a slot of the primary was: whoever decodes from there on needs nothing deleted before `catalog_xmin`."""

    confirmed_flush_lsn: int
    catalog_xmin: int


@dataclass(frozen=True)
class Confirmed:
    """A position that the client of a slot has confirmed, of this timeline of the primary."""

    timeline: int
    lsn: int


@dataclass(frozen=True)
class Incarnation:
    """A slot of the primary, which no other of that name is, and the least confirmed_flush_lsn that it was seen at."""

    marker: str
    lsn: int


@dataclass(frozen=True)
class Settled:
    """The row of a slot's database, and a position in the WAL after all that the change which made it has written."""

    datoid: int
    xmin: int
    lsn: int


@dataclass(frozen=True)
class CopyRecord:
    """What we remember of one copy on one standby."""

    #: The slot on the primary, and the name that the copy has once it is proven.
    name: str
    #: We made the slot of this name here, and so may drop it.
    made: bool = False
    #: The temporary name that we made it under and have not seen go; recorded *before* `Reserve` is carried out.
    temporary_name: str | None = None
    #: The marker of the copy that we made last: the temporary name that it was reserved under. Names are taken anew.
    marker: str | None = None
    #: A `Rename` to `name` was begun; recorded before it is carried out, cleared when its end is known.
    renaming: bool = False
    #: `StandbyRecord.generation` that `seen`, `removed_before` and `proven_in` are of.
    generation: int = 0
    #: When the copy that is there now was first seen in the epoch that is held now; `None` before.
    seen: Sighting | None = None
    #: The slot's catalog_xmin at the first poll of this epoch at which the primary had heard of the copy: nothing
    #: that was deleted by this transaction or a later one had been removed until then. `None` before.
    removed_before: int | None = None
    #: Where it was first seen at all; `None` before. Stays when the epoch changes.
    reserved: Reserved | None = None
    #: The confirmed_flush_lsn at which its catalog_xmin was first known to be what is needed from there on
    #: (`conditions.py`); void for a copy that stands before it.
    decoded_at: int | None = None
    #: Where the slot was at the last poll, and the farthest of such places that the copy has passed.
    slot_was: SlotPosition | None = None
    passed: SlotPosition | None = None
    #: The farthest that the slot's client has been seen: it outlives the copy, and a crash of the primary.
    confirmed: Confirmed | None = None
    #: The slot's database as it was last seen on the primary; `None`: it was being changed (`database.py`).
    settled: Settled | None = None
    #: The slot as it was last seen on the primary; `None`: it had no marker (`incarnation.py`).
    incarnation: Incarnation | None = None
    #: When PostgreSQL's own copy was last seen synchronized by SQL alone, by the standby's clock (`native.py`).
    synced_at: int | None = None
    #: This server had the slot of that name of its own, while it was the primary.
    seen_on_primary: bool = False
    #: The epoch in which it was last proven that no row it needs is gone; void in any other.
    proven_in: FeedbackEpochKey | None = None
    #: Polls in a row, each with the real primary seen, in which the primary had no such slot.
    polls_gone: int = 0
    #: Polls in a row in which the copy was ahead of the slot on the primary.
    polls_ahead: int = 0
    #: The state it was found in last, by name; "" before the first.
    state: str = ""
    #: When it was last proven, by the standby's clock. With the primary down, `ready` answers from that, with its age.
    proven_at: int | None = None


@dataclass(frozen=True)
class StandbyRecord:
    """What we remember of one standby. Written down before actions are carried out, read back after a crash."""

    #: The epoch of the last poll; `None`: none held.
    epoch: FeedbackEpochKey | None = None
    #: `ObservedStandby.walreceiver_start` in that epoch.
    walreceiver_start: int | None = None
    copies: Mapping[str, CopyRecord] = field(default_factory=dict)
    #: Goes up with each poll at which `epoch` is not what it was: an epoch that is interrupted is another one, even
    #: with an equal key. What a copy's record has of another generation counts for nothing.
    generation: int = 0

    def of(self, name: str) -> CopyRecord:
        """What is remembered of the copy of that name; nothing, if nothing is."""
        return self.copies.get(name, CopyRecord(name))


@dataclass(frozen=True)
class Selection:
    """Which of the primary's logical slots are to be kept: those that any of the four names.

    Patterns are shell patterns (`fnmatch`), compared as they are. With all four empty, every slot is kept.
    """

    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    plugins: frozenset[str] = frozenset()
    databases: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ReadinessTerms:
    """What an answer has to be good for."""

    #: Microseconds for which a proof counts once the primary does not answer; `None`: without limit.
    max_age: int | None = None
    #: PostgreSQL's own word counts for its copies where the extension is not (`native.py`).
    accept_native: bool = False
