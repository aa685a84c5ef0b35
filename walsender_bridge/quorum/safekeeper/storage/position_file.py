"""What the WAL storage remembers beside the WAL itself: where it begins, a bound of its end, and a cut in progress.

`begin_lsn`: no WAL below it is held. `durable_lsn`: the WAL is durable at least up to here; it is written when the
storage stops, starts, is cut, or loses old WAL, not with each write; `exact`: the WAL ends there. `cutting`: a cut at `durable_lsn` was begun; until it is done
again to its end, nothing at or behind that position is WAL.
"""

from dataclasses import asdict, dataclass

from walsender_bridge.errors import CorruptError, NotSupportedError
from walsender_bridge.runtime import record_file
from walsender_bridge.runtime.folder import Disk

NAME = "position"
MAGIC = b"TUSKWALP"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class StoragePosition:
    """See the module. LSNs; all 0: nothing was ever held."""

    begin_lsn: int = 0
    durable_lsn: int = 0
    cutting: bool = False
    exact: bool = False


def save(disk: Disk, position: StoragePosition) -> None:
    """Replace the file, durably. Raises `OSError`."""
    record_file.replace(disk, NAME, record_file.pack(MAGIC, FORMAT, asdict(position)))


def read(disk: Disk) -> StoragePosition | None:
    """What it says; None: there is none. Nothing is written. Raises `CorruptError` and `NotSupportedError`."""
    if NAME not in disk.names():
        return None
    where = f"{disk}/{NAME}"
    try:
        _, record = record_file.unpack(record_file.read_whole(disk, NAME), MAGIC, FORMAT)
        return StoragePosition(**record)
    except NotSupportedError as error:
        raise NotSupportedError(error.what, where=where, repair=error.repair) from error
    except (CorruptError, TypeError) as error:
        raise CorruptError(
            f"it is damaged ({error})",
            where=where,
            repair="let the safekeeper join as a new member; see what happened to its disk",
        ) from error


def load(disk: Disk) -> StoragePosition | None:
    """The same, for the safekeeper whose it is: a damaged one is kept aside."""
    try:
        return read(disk)
    except CorruptError as error:
        aside = record_file.keep_aside(disk, NAME)
        raise CorruptError(
            f"{error.what}, and was kept as {aside}", where=error.where, repair=error.repair
        ) from error
