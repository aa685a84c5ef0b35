"""The errors a user of Tuskline can meet, one class a cause.

Each says what is wrong, where, and how it is repaired. `Cause` is the one enumeration of causes: its
value is the exit code of the command line, and its name travels over the change log's wire, so that a
server's error is raised again at the client as the same class (`from_wire`).
"""

from enum import IntEnum
from typing import ClassVar, Final


class Cause(IntEnum):
    """Why something failed. The value is the process exit code (1 and 2 are Python's and the shell's)."""

    INTERNAL = 1
    USAGE = 2
    CONFIG = 3
    CONNECTION = 4
    AUTHENTICATION = 5
    PRIVILEGE = 6
    SERVER_SETTING = 7
    SLOT = 8
    PUBLICATION = 9
    DIVERGED = 10
    FENCED = 11
    CORRUPT = 12
    TRIMMED = 13
    UNKNOWN_STREAM = 14
    UNSUPPORTED_VALUE = 15
    MALFORMED = 16
    LAKE = 17
    TIMEOUT = 18
    UNAVAILABLE = 19
    NOT_SUPPORTED = 20
    DIFFERENT = 21
    INVALID_REPLICA = 22
    LOCAL_SERVER = 23
    SCHEMA = 24
    SNAPSHOT = 25
    RUNNING = 26
    SPOOL = 27
    DISK_FULL = 28
    INVARIANT = 29


#: What stands before the repair, where an error is written for people: as PostgreSQL writes it.
HINT: Final = "\nHINT:  "


class TusklineError(Exception):
    """An error with its place and its repair.

    `what` is one sentence; `where` names the server, file, slot or table; `repair` says what to do.
    """

    cause: ClassVar[Cause] = Cause.INTERNAL

    def __init__(self, what: str, *, where: str = "", repair: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.repair = repair

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}{HINT}{self.repair}" if self.repair else text

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.where, self.repair)

    def to_wire(self) -> dict[str, str]:
        """The error as the change log's services send it (see `from_wire`)."""
        return {
            "code": self.cause.name,
            "what": self.what,
            "where": self.where,
            "repair": self.repair,
        }


class UsageError(TusklineError):
    """A call, flag or option that does not make sense."""

    cause = Cause.USAGE


class ConfigError(TusklineError):
    """The configuration is wrong."""

    cause = Cause.CONFIG


class ConnectionFailedError(TusklineError):
    """A server could not be reached, or the connection broke."""

    cause = Cause.CONNECTION


class AuthenticationError(TusklineError):
    """A server refused the user or the password."""

    cause = Cause.AUTHENTICATION


class PrivilegeError(TusklineError):
    """The role lacks a privilege."""

    cause = Cause.PRIVILEGE


class UntrustedError(PrivilegeError):
    """Something that the session would use could run another role's code with its rights."""


class ServerSettingError(TusklineError):
    """A server is not set up for what was asked, such as `wal_level` below `logical`."""

    cause = Cause.SERVER_SETTING


class SlotError(TusklineError):
    """A replication slot is in use, lost, or not ours."""

    cause = Cause.SLOT


class SlotInUseError(SlotError):
    """Somebody else streams from the slot: perhaps a walsender that has not noticed that we died."""


class LostSlotError(SlotError):
    """A slot that the server has invalidated: it sends nothing any more."""


class PublicationError(TusklineError):
    """A publication is missing or does not fit."""

    cause = Cause.PUBLICATION


class DivergedError(TusklineError):
    """The log holds what the server's history does not, or the slot skipped what the log lacks."""

    cause = Cause.DIVERGED


class FencedError(TusklineError):
    """A newer writer has taken over."""

    cause = Cause.FENCED


class CorruptError(TusklineError):
    """Stored bytes are not what was written."""

    cause = Cause.CORRUPT


class TrimmedError(TusklineError):
    """What was asked for has been trimmed."""

    cause = Cause.TRIMMED


class UnknownStreamError(TusklineError):
    """No log stream of that name."""

    cause = Cause.UNKNOWN_STREAM


class UnsupportedValueError(TusklineError):
    """A value that the target cannot hold, or that no walsender can send."""

    cause = Cause.UNSUPPORTED_VALUE


class MalformedMessageError(TusklineError):
    """Bytes from a peer that are not the protocol."""

    cause = Cause.MALFORMED


class LakeError(TusklineError):
    """The lake is not ours, not writable, or not whole."""

    cause = Cause.LAKE


class DeadlineError(TusklineError):
    """Something did not happen in the time that was given for it."""

    cause = Cause.TIMEOUT


class UnavailableError(TusklineError):
    """A service of Tuskline does not answer, or is not ready yet."""

    cause = Cause.UNAVAILABLE


class OutvotedError(UnavailableError):
    """A safekeeper voted for another proposer, but none was elected: a campaign in a higher term resolves it."""


class NotSupportedError(TusklineError):
    """A thing that this version of Tuskline, or a part beneath it, does not do."""

    cause = Cause.NOT_SUPPORTED


class InvalidReplicaError(TusklineError):
    """A replica that may not report or commit until it has synchronised."""

    cause = Cause.INVALID_REPLICA


class LocalServerError(TusklineError):
    """A PostgreSQL server of our own could not be made, started or stopped."""

    cause = Cause.LOCAL_SERVER


class SchemaError(TusklineError):
    """A table's columns are not those that a reader began with."""

    cause = Cause.SCHEMA


class SnapshotError(TusklineError):
    """An exported snapshot that cannot be read (any more)."""

    cause = Cause.SNAPSHOT


class RunningError(TusklineError):
    """The parts run, and must not for what was asked, such as a second start."""

    cause = Cause.RUNNING


class SpoolError(TusklineError):
    """Large transactions in progress do not fit into the room that they have on disk."""

    cause = Cause.SPOOL


class DiskFullError(TusklineError):
    """No room on a disk, or, at a safekeeper, less than is to stay free. It goes on by itself once there is room."""

    cause = Cause.DISK_FULL


class InvariantError(TusklineError):
    """An invariant of a part does not hold after a step: a fault of ours. The part stopped before it wrote anything of that step."""

    cause = Cause.INVARIANT


def _all_classes(root: type[TusklineError]) -> list[type[TusklineError]]:
    return [root, *(found for child in root.__subclasses__() for found in _all_classes(child))]


def _rebuild(kind: type[TusklineError], what: str, where: str, repair: str) -> TusklineError:
    return kind(what, where=where, repair=repair)


def from_wire(record: dict[str, str]) -> TusklineError:
    """The error that a service sent with `TusklineError.to_wire`, as its own class."""
    code = record.get("code", Cause.INTERNAL.name)
    kind = next((k for k in _all_classes(TusklineError) if k.cause.name == code), TusklineError)
    return kind(
        record.get("what", ""), where=record.get("where", ""), repair=record.get("repair", "")
    )
