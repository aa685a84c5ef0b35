"""The control file: what a safekeeper has promised (`effects.ControlState`), on disk.

Its votes, histories and memberships are why a committed byte cannot be lost, so nothing ever replaces it: a data
directory that holds anything and lacks an intact control file is refused, since a safekeeper that lost its votes could
give them twice. It rejoins as a new member, with a full resync from the others (rule 10).
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from walsender_bridge.errors import CorruptError, NotSupportedError, TusklineError
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.history import History, HistoryEntry
from walsender_bridge.quorum.protocol.messages import NodeId, ServerInfo
from walsender_bridge.quorum.safekeeper.effects import ControlState, Fence
from walsender_bridge.runtime import record_file
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


def to_record(state: ControlState) -> dict[str, Any]:
    """The state as JSON values; identities, which have 128 bits, in hexadecimal."""
    configuration = state.configuration
    new = configuration.new_members
    return {
        "safekeeper": f"{state.safekeeper:032x}",
        "server": asdict(state.server),
        "node_id": [state.node_id.term, f"{state.node_id.proposer:032x}"],
        "history": [[e.election_epoch, e.start_lsn, e.timeline] for e in state.history.entries],
        "configuration": {
            "generation": configuration.generation,
            "members": sorted(f"{member:032x}" for member in configuration.members),
            "new_members": None if new is None else sorted(f"{member:032x}" for member in new),
            "term": configuration.term,
            "distrusted": sorted(f"{member:032x}" for member in configuration.distrusted),
            "quorum": f"{configuration.quorum:032x}",
        },
        "fence": None if state.fence is None else asdict(state.fence),
        "commit_lsn": state.commit_lsn,
        "restart_lsn": state.restart_lsn,
    }


def from_record(record: dict[str, Any]) -> ControlState:
    """The state of a record. Raises `CorruptError`."""
    try:
        term, proposer = record["node_id"]
        configuration, fence = record["configuration"], record["fence"]
        new = configuration["new_members"]
        return ControlState(
            safekeeper=int(record["safekeeper"], 16),
            server=ServerInfo(**record["server"]),
            node_id=NodeId(int(term), int(proposer, 16)),
            history=History(tuple(HistoryEntry(*map(int, entry)) for entry in record["history"])),
            configuration=Configuration(
                generation=int(configuration["generation"]),
                members=frozenset(int(member, 16) for member in configuration["members"]),
                new_members=None if new is None else frozenset(int(m, 16) for m in new),
                term=int(configuration["term"]),
                # In format 1, but missing from records of earlier releases.
                distrusted=frozenset(int(m, 16) for m in configuration.get("distrusted", ())),
                quorum=int(configuration["quorum"], 16),
            ),
            fence=None if fence is None else Fence(**fence),
            commit_lsn=int(record["commit_lsn"]),
            restart_lsn=int(record["restart_lsn"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"invalid record: {error!r}") from error


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
