"""The control file: what a safekeeper has promised (`effects.ControlState`), on disk.

Its votes, histories and memberships are why a committed byte cannot be lost, so nothing ever replaces it: a data
directory that holds anything and lacks an intact control file is refused, since a safekeeper that lost its votes could
give them twice. It rejoins as a new member, with a full resync from the others (rule 10).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from walsender_bridge.errors import CorruptError, NotSupportedError, TusklineError
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.history import History, HistoryEntry
from walsender_bridge.quorum.protocol.messages import NodeId, ServerInfo
from walsender_bridge.quorum.safekeeper.effects import ControlState, Fence
from walsender_bridge.runtime import json_model, record_file
from walsender_bridge.runtime.folder import Disk

NAME = "control"
MAGIC = b"TUSKCTRL"
FORMAT = 2


def _without_quorum(record: dict[str, Any]) -> dict[str, Any]:
    """Version 1 had no quorum id; the next elected proposer assigns one."""
    configuration = record.get("configuration") or {}
    return {**record, "configuration": {**configuration, "quorum": "0"}}


#: By version: converts a record to the next version.
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _without_quorum}

_REPAIR = (
    "its votes are unknown, so it may not take part: move its data directory away, then tuskline down, up, and"
    " tuskline safekeeper replace ADDRESS ADDRESS, which resyncs it from the others (docs/quorum-lost.md)"
)


@dataclass(frozen=True, slots=True)
class _StoredConfiguration:
    generation: int
    members: tuple[str, ...]
    new_members: tuple[str, ...] | None
    term: int
    #: In format 1, but missing from records of earlier releases.
    distrusted: tuple[str, ...] = ()
    quorum: str = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class _Stored:
    """The record: `ControlState` with its identities, which have 128 bits, in hexadecimal."""

    safekeeper: str
    server: ServerInfo
    node_id: tuple[int, str]
    history: tuple[tuple[int, Lsn, int], ...]
    configuration: _StoredConfiguration
    fence: Fence | None
    commit_lsn: Lsn
    restart_lsn: Lsn


def to_record(state: ControlState) -> dict[str, Any]:
    """The state as JSON values."""
    configuration = state.configuration
    new = configuration.new_members
    stored = _Stored(
        safekeeper=_hexadecimal(state.safekeeper),
        server=state.server,
        node_id=(state.node_id.term, _hexadecimal(state.node_id.proposer)),
        history=tuple((e.election_epoch, e.start_lsn, e.timeline) for e in state.history.entries),
        configuration=_StoredConfiguration(
            generation=configuration.generation,
            members=_sorted(configuration.members),
            new_members=None if new is None else _sorted(new),
            term=configuration.term,
            distrusted=_sorted(configuration.distrusted),
            quorum=_hexadecimal(configuration.quorum),
        ),
        fence=state.fence,
        commit_lsn=state.commit_lsn,
        restart_lsn=state.restart_lsn,
    )
    return json_model.plain(stored)


def from_record(record: dict[str, Any]) -> ControlState:
    """The state of a record. Raises `CorruptError`."""
    try:
        stored = json_model.from_plain(_Stored, record, strict=True)
        configuration = stored.configuration
        new = configuration.new_members
        return ControlState(
            safekeeper=int(stored.safekeeper, 16),
            server=stored.server,
            node_id=NodeId(stored.node_id[0], int(stored.node_id[1], 16)),
            history=History(tuple(HistoryEntry(*each) for each in stored.history)),
            configuration=Configuration(
                generation=configuration.generation,
                members=_set(configuration.members),
                new_members=None if new is None else _set(new),
                term=configuration.term,
                distrusted=_set(configuration.distrusted),
                quorum=int(configuration.quorum, 16),
            ),
            fence=stored.fence,
            commit_lsn=stored.commit_lsn,
            restart_lsn=stored.restart_lsn,
        )
    except ValueError as error:
        raise CorruptError(f"invalid record: {error}") from error


def _hexadecimal(identity: int) -> str:
    return f"{identity:032x}"


def _sorted(identities: frozenset[int]) -> tuple[str, ...]:
    return tuple(sorted(map(_hexadecimal, identities)))


def _set(identities: tuple[str, ...]) -> frozenset[int]:
    return frozenset(int(each, 16) for each in identities)


def save(disk: Disk, state: ControlState) -> None:
    """Replace the control file, durably. Raises `OSError`."""
    record_file.replace(disk, NAME, record_file.pack(MAGIC, FORMAT, to_record(state)))


def read(disk: Disk) -> tuple[int, ControlState] | None:
    """Format version and state in the file; None: the data directory is new. Nothing is written.

    Raises `CorruptError` (damaged; missing beside anything else) and `NotSupportedError` (newer).
    """
    where = f"{disk}/{NAME}"
    names = disk.names() - {NAME + record_file.NEW}
    if NAME not in names:
        if names:
            raise CorruptError(
                f"the control file is missing, but the folder holds {min(names)}",
                where=where,
                repair=_REPAIR,
            )
        return None
    try:
        version, record = record_file.unpack(record_file.read_whole(disk, NAME), MAGIC, FORMAT)
        for older in range(version, FORMAT):
            record = UPGRADES[older](record)
        return version, from_record(record)
    except NotSupportedError as error:
        raise NotSupportedError(error.what, where=where, repair=error.repair) from error
    except TusklineError as error:
        raise CorruptError(
            f"the control file is damaged: {error.what}", where=where, repair=_REPAIR
        ) from error


def load(disk: Disk, *beside: Disk) -> ControlState | None:
    """The control file's state, for its own safekeeper; None: the data directory is new.

    It is new only if its other folders, `beside`, are empty, too. A file of an older version is upgraded and rewritten.
    Raises as `read`; a damaged file is renamed.
    """
    try:
        found = read(disk)
    except CorruptError as error:
        if NAME not in disk.names():
            raise
        aside = record_file.keep_aside(disk, NAME)
        raise CorruptError(
            f"{error.what}; it was renamed to {aside}", where=error.where, repair=error.repair
        ) from error
    if found is None:
        left = {name for each in beside for name in each.names()}
        if left:
            raise CorruptError(
                f"the control file is missing, but {min(left)} exists",
                where=f"{disk}/{NAME}",
                repair=_REPAIR,
            )
        return None
    version, state = found
    if version < FORMAT:
        save(disk, state)
    return state
