"""The resolver's input: a primary's slots, a standby's slots, and the record of the standby.

Everything here is a value. An LSN is an `int` (bytes, `walsender_bridge.postgres.protocol.lsn`), a transaction is PostgreSQL's
32-bit `xid` as an `int`, a time is an `int` of microseconds since 1970 by the clock of the server that it comes
from. `None` is SQL's NULL, or a column that the major version lacks. Slots are identified by name, which is unique
on one server.

How to sample, since the safety argument (`conditions.py`) rests on the order:

1. the primary: its walsenders, then its physical slots, then its logical ones (three statements on one connection;
   a reply counted too early is only slow, one counted too late is a false proof);
2. then the standby: its settings, then its slots, then its clock and `flush_lsn`.

A verdict holds for the moment at which the primary was sampled.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from walsender_bridge.postgres.protocol.lsn import Lsn

#: A slot under such a name is being proven (`TEMPORARY_PREFIX` of the extension).
TEMPORARY_PREFIX = "_tuskline_tmp_"


@dataclass(frozen=True)
class LogicalSlot:
    """A logical slot of the primary: a row of pg_replication_slots, with `inspect` for what that view lacks."""

    name: str
    plugin: str
    #: The name of its database on this server.
    database: str
    restart_lsn: Lsn | None
    confirmed_flush_lsn: Lsn | None
    catalog_xmin: int | None
    two_phase: bool = False
    #: Where two_phase began (14+); 0 where that is left empty (18), `None` where two_phase is off.
    two_phase_at: Lsn | None = None
    #: A temporary slot, dropped at the end of its session: ignored.
    temporary: bool = False
    #: PostgreSQL itself synchronizes it (17+).
    failover: bool = False
    active_pid: int | None = None
    #: reserved, extended, unreserved or lost (13+).
    wal_status: str | None = None
    #: The invalidation reason, as 18 names it (`inspect` shows it on every major version); `None`: it is valid.
    invalidation: str | None = None
    #: The OID of its database, which a rename does not change.
    datoid: int = 0
    #: Written by `mark`, or by `reserve` before this server was promoted; `None`: it has none yet.
    incarnation_id: str | None = None


@dataclass(frozen=True)
class PhysicalSlot:
    """A physical slot of the primary, with the walsender that uses it, if one does."""

    name: str
    restart_lsn: Lsn | None
    xmin: int | None
    catalog_xmin: int | None
    #: Written by `mark`; removed with the slot, and survives a crash.
    incarnation_id: str | None
    #: The walsender's process; `None`: the slot is inactive.
    active_pid: int | None = None
    #: When that process began (pg_stat_replication.backend_start), by the primary's clock.
    backend_start: int | None = None
    #: pg_stat_replication.reply_time of that walsender (12+): when the standby sent its last reply, by the
    #: *standby's* clock.
    reply_time: int | None = None
    #: pg_stat_replication.flush_lsn of that walsender.
    flush_lsn: Lsn | None = None
    wal_status: str | None = None
    invalidation: str | None = None


@dataclass(frozen=True)
class ObservedPrimary:
    """The primary, whose logical slots are copied, at one moment."""

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
    wal_lsn: Lsn
    logical_slots: tuple[LogicalSlot, ...] = ()
    physical_slots: tuple[PhysicalSlot, ...] = ()
    #: The extension's functions exist; without them incarnation ids and `two_phase_at` are not known.
    has_extension: bool = True
    #: By OID, the xmin of each database's row in pg_database: each ALTER DATABASE changes it.
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
    """The server that a walreceiver streams from, as that server itself reported.

    It is queried at pg_stat_wal_receiver's sender_host and sender_port. That distinguishes a standby of the primary
    from one behind another standby or a safekeeper: slot names may be the same on both.
    """

    system_id: int
    in_recovery: bool
    postmaster_start: int


@dataclass(frozen=True)
class SafekeeperUpstream:
    """The walreceiver streams from a safekeeper at this address, which has WAL and slots but is no PostgreSQL server."""

    where: str


@dataclass(frozen=True)
class SlotCopy:
    """A slot of the standby, as `tuskline_slots.inspect` shows it. The resolver decides whether it is a copy."""

    name: str
    #: `None` for a physical slot.
    plugin: str | None
    database: str | None
    #: persistent, ephemeral or temporary.
    persistency: str
    restart_lsn: Lsn | None
    confirmed_flush_lsn: Lsn | None
    catalog_xmin: int | None
    #: The value by which the server keeps rows, and which it sends upstream as feedback.
    effective_catalog_xmin: int | None
    active_pid: int | None = None
    two_phase: bool = False
    two_phase_at: Lsn | None = None
    #: Maintained by PostgreSQL's own slot synchronization (17+).
    synced: bool = False
    #: Whether PostgreSQL's own slot synchronization copies it to standbys after a promotion (17+).
    failover: bool = False
    #: The invalidation reason, as 18 names it; `None`: it is valid.
    invalidation: str | None = None
    #: The file pg_logical/snapshots/<restart_lsn>.snap exists. `None` without a restart_lsn.
    snapshot_present: bool | None = None
    #: That file was written by `advance`, whose decoder leaves nothing out.
    snapshot_complete: bool | None = None
    #: Another decoder wrote the snapshot of a later position.
    foreign_snapshot_after: bool | None = None
    #: WAL from restart_lsn on exists, without a gap. `None` without a restart_lsn.
    wal_present: bool | None = None
    #: All mapping files of rewritten catalogs that a decoder may need exist, and restartpoints retain them.
    mappings_complete: bool | None = None
    #: The temporary name under which `reserve` created it. `None`: it was created otherwise.
    incarnation_id: str | None = None
    #: Since when it has been inactive, by the standby's clock (17+); `None`: it is active, or this is not known.
    inactive_since: int | None = None
    #: The OID of its database.
    datoid: int = 0

    @property
    def has_temporary_name(self) -> bool:
        """It has a name that no client uses, since it is unproven."""
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
    #: pg_conf_load_time(): changes with every reload. Each process has its own, and a new connection has the
    #: postmaster's; a change without a reload costs one needless proof.
    conf_load_time: int
    #: clock_timestamp(), read after the slots.
    clock: int
    hot_standby_feedback: bool
    #: Seconds; with 0 the standby sends no feedback even if hot_standby_feedback is on.
    wal_receiver_status_interval: int
    #: `None` or empty: it streams without a slot.
    primary_slot_name: str | None
    #: pg_stat_wal_receiver.status; `None` without a walreceiver.
    walreceiver_status: str | None
    #: pg_stat_wal_receiver.slot_name: the slot in use now.
    walreceiver_slot_name: str | None
    #: When the walreceiver's process began (pg_stat_activity.backend_start), by the standby's clock.
    walreceiver_start: int | None
    #: The server that it streams from; `None` if there is none, or it did not answer.
    upstream: Upstream | SafekeeperUpstream | None
    #: pg_last_wal_replay_lsn()
    replay_lsn: Lsn
    #: The WAL that it has on disk: pg_last_wal_receive_lsn(), at least `replay_lsn`.
    flush_lsn: Lsn
    #: Slots of every kind, under every name.
    slots: tuple[SlotCopy, ...] = ()
    #: The extension's library and functions exist. Without them only PostgreSQL's own copies are evaluated.
    has_extension: bool = True
    #: The configured physical slot; `None`: none is configured. A server that streams from another slot is another
    #: standby.
    configured_slot: str | None = None
    #: It has replayed WAL that it did not receive from its upstream: from an archive.
    replays_archive: bool = False
    #: The WAL that a checkpoint retains for slots (max_slot_wal_keep_size, 13+), in whole segments; `None`: no limit.
    slot_wal_segments: int | None = None
    #: wal_segment_size, in bytes.
    segment_bytes: int = 16 * 1024 * 1024
    #: idle_replication_slot_timeout (18+), in microseconds; 0: none.
    idle_timeout: int = 0
    #: sync_replication_slots (17+): PostgreSQL itself creates copies of slots with `failover`.
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
        """The part of idle_replication_slot_timeout for which the copy has been idle: from 1 on a checkpoint invalidates it.

        A promotion ends with one. PostgreSQL exempts its own copies during recovery, and restarts their timeout after it.
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
    """Identifies an uninterrupted reservation of the physical slot; see `feedback_epoch.py` for the argument.

    Two polls with equal keys are of one epoch. The slot's values are not part of it: they can return to the same number.
    """

    system_id: int
    timeline: int
    primary_start: int
    physical_slot: str
    incarnation_id: str
    walsender_pid: int
    walsender_start: int
    conf_load_time: int


@dataclass(frozen=True)
class Sighting:
    """When a copy was first seen on the standby, in values that the standby sends upstream in order."""

    #: The standby's clock, just after the copy was seen there.
    clock: int
    #: The WAL that the standby had on disk then.
    flush_lsn: Lsn


@dataclass(frozen=True)
class Reserved:
    """A copy's position before it was ever advanced. Its catalog_xmin was chosen then, not by a decoder."""

    restart_lsn: Lsn
    catalog_xmin: int


@dataclass(frozen=True)
class SlotPosition:
    """A position of a slot of the primary: a decoder that starts there needs no row deleted before `catalog_xmin`."""

    confirmed_flush_lsn: Lsn
    catalog_xmin: int


@dataclass(frozen=True)
class Confirmed:
    """A position that the client of a slot has confirmed, of this timeline of the primary."""

    timeline: int
    lsn: Lsn


@dataclass(frozen=True)
class Incarnation:
    """One creation of a slot of the primary, and the lowest confirmed_flush_lsn at which it was seen."""

    incarnation_id: str
    lsn: Lsn


@dataclass(frozen=True)
class Settled:
    """The row of a slot's database, and a position in the WAL after all records of the change that wrote this row."""

    datoid: int
    xmin: int
    lsn: Lsn


@dataclass(frozen=True)
class CopyRecord:
    """The record of one copy on one standby."""

    #: The name of the slot on the primary, and of the copy once it is proven.
    name: str
    #: We created the slot of this name here, and so may drop it.
    created: bool = False
    #: The temporary name that we created it under and have not seen removed; recorded *before* `Reserve` is carried out.
    temporary_name: str | None = None
    #: Of the copy that we created last: the temporary name that it was reserved under. Other slots can take its name.
    incarnation_id: str | None = None
    #: A `Rename` to `name` was started; recorded before it is carried out, cleared when its end is known.
    renaming: bool = False
    #: `StandbyRecord.generation` that `seen`, `removed_before` and `proven_in` are of.
    generation: int = 0
    #: When the current copy was first seen in the current epoch; `None` before.
    seen: Sighting | None = None
    #: The slot's catalog_xmin at the first poll of this epoch at which the primary had heard of the copy: nothing
    #: that was deleted by this transaction or a later one had been removed until then. `None` before.
    removed_before: int | None = None
    #: Its position when it was first seen at all; `None` before. Stays when the epoch changes.
    reserved: Reserved | None = None
    #: The confirmed_flush_lsn from which on its catalog_xmin was first known to suffice (`conditions.py`); void for a
    #: copy at an earlier position.
    decoded_at: int | None = None
    #: The slot's position at the last poll, and the farthest of such positions that the copy has passed.
    slot_was: SlotPosition | None = None
    passed: SlotPosition | None = None
    #: The farthest position at which the slot's client was seen: it outlives the copy, and a crash of the primary.
    confirmed: Confirmed | None = None
    #: The slot's database as it was last seen on the primary; `None`: it was being changed (`database.py`).
    settled: Settled | None = None
    #: The slot as it was last seen on the primary; `None`: it had no incarnation id (`incarnation.py`).
    incarnation: Incarnation | None = None
    #: When PostgreSQL's own copy was last seen synchronized by SQL alone, by the standby's clock (`native.py`).
    synced_at: int | None = None
    #: This server had a slot of that name while it was the primary.
    seen_on_primary: bool = False
    #: The epoch in which it was last proven that all rows it needs exist; void in any other.
    proven_in: FeedbackEpochKey | None = None
    #: Consecutive polls, each of the real primary, in which the primary had no such slot.
    polls_gone: int = 0
    #: Consecutive polls in which the copy was ahead of the slot on the primary.
    polls_ahead: int = 0
    #: The last state, by name; "" before the first.
    state: str = ""
    #: When it was last proven, by the standby's clock. With the primary down, `ready` answers from that, with its age.
    proven_at: int | None = None


@dataclass(frozen=True)
class StandbyRecord:
    """The record of one standby. Saved before actions are carried out, read back after a crash.

    It is stored under the names of its fields, and of those of what it consists of: see `record_file.py`.
    """

    #: The epoch of the last poll; `None`: none held.
    epoch: FeedbackEpochKey | None = None
    #: `ObservedStandby.walreceiver_start` in that epoch.
    walreceiver_start: int | None = None
    #: Incremented at each poll at which `epoch` changed: an epoch that was interrupted is another one, even with an
    #: equal key. What a copy's record has of another generation is void.
    generation: int = 0
    copies: Mapping[str, CopyRecord] = field(default_factory=dict)

    def of(self, name: str) -> CopyRecord:
        """The record of the copy of that name; an empty one if there is none."""
        return self.copies.get(name, CopyRecord(name))


@dataclass(frozen=True)
class Selection:
    """Which of the primary's logical slots are copied: those that match any of the four fields.

    Patterns are shell patterns (`fnmatch`), case-sensitive. With all four empty, every slot is copied.
    """

    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    plugins: frozenset[str] = frozenset()
    databases: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ReadinessTerms:
    """What a verdict must satisfy."""

    #: Microseconds for which a proof counts once the primary does not answer; `None`: without limit.
    max_age: int | None = None
    #: PostgreSQL's own word counts for its copies where the extension is not (`native.py`).
    accept_native: bool = False
