"""The errors that users of Tuskline can see, one class for each cause.

Each error has a message, a place and a hint. `Cause` is the single enumeration of causes: its value is the exit code of the
command line, and its name is sent over the change log's protocol, so that the client raises a server's error as the same
class (`from_wire`).
"""

from enum import IntEnum
from typing import ClassVar, Final


class Cause(IntEnum):
    """The cause of an error. Its value is the exit code (1 and 2 as Python and shells use them)."""

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
    SEALED = 30
    BEHIND = 31
    NOT_LEADER = 32


#: The prefix of the repair in an error's text, as PostgreSQL writes it.
HINT: Final = "\nHINT:  "


class TusklineError(Exception):
    """An error with its place and its hint.

    `what`: the message, one sentence; `where`: the server, file, slot or table; `repair`: the hint, what to do.
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
    """An invalid call, flag or option."""

    cause = Cause.USAGE


class ConfigError(TusklineError):
    """The configuration is invalid."""

    cause = Cause.CONFIG


class ConnectionFailedError(TusklineError):
    """A server could not be reached, or the connection broke."""

    cause = Cause.CONNECTION


class AuthenticationError(TusklineError):
    """A server refused the user or the password."""

    cause = Cause.AUTHENTICATION


class PrivilegeError(TusklineError):
    """The role lacks a privilege: a role of PostgreSQL, or of a certificate."""

    cause = Cause.PRIVILEGE


class UntrustedError(PrivilegeError):
    """An object that the session would use could run another role's code with the session's privileges."""


class ServerSettingError(TusklineError):
    """A server setting prevents the operation, such as `wal_level` below `logical`."""

    cause = Cause.SERVER_SETTING


class SlotError(TusklineError):
    """A replication slot is in use, lost, or another program's."""

    cause = Cause.SLOT


class SlotInUseError(SlotError):
    """Another client streams from the slot, possibly a walsender that has not detected the end of its client yet."""


class LostSlotError(SlotError):
    """The server has invalidated the slot, which sends nothing any more."""


class PublicationError(TusklineError):
    """A publication is missing or does not match."""

    cause = Cause.PUBLICATION


class DivergedError(TusklineError):
    """Two histories diverge: the log has transactions that the server's history lacks, or the slot skipped some that the log lacks."""

    cause = Cause.DIVERGED


class FencedError(TusklineError):
    """A newer writer has taken over."""

    cause = Cause.FENCED


class CorruptError(TusklineError):
    """Stored data is damaged: the bytes differ from those that were written."""

    cause = Cause.CORRUPT


class TrimmedError(TusklineError):
    """The requested data has been trimmed."""

    cause = Cause.TRIMMED


class UnknownStreamError(TusklineError):
    """There is no log stream of that name."""

    cause = Cause.UNKNOWN_STREAM


class UnsupportedValueError(TusklineError):
    """A value that the target cannot represent, or that no walsender can send."""

    cause = Cause.UNSUPPORTED_VALUE


class MalformedMessageError(TusklineError):
    """A peer violated the protocol."""

    cause = Cause.MALFORMED


class LakeError(TusklineError):
    """The lake belongs to another log, is not writable, or is incomplete."""

    cause = Cause.LAKE


class RefusedByCatalogError(LakeError):
    """The catalog of a lake refuses a request: for what it asks of one table, or for the settings by which it is asked."""


class DeadlineError(TusklineError):
    """A timeout expired."""

    cause = Cause.TIMEOUT


class UnavailableError(TusklineError):
    """A service of Tuskline does not answer, or is not ready yet."""

    cause = Cause.UNAVAILABLE


class StreamSealedError(UnavailableError):
    """The stream was sealed, to go on with other replicas: its writer needs a new term."""

    cause = Cause.SEALED


class SilentError(UnavailableError):
    """A service of Tuskline did not answer in time: it hangs, or needs longer."""


class BehindError(UnavailableError):
    """A replica of the log does not have what is asked for yet; another one may."""

    cause = Cause.BEHIND


class UnreachableError(UnavailableError):
    """No connection to a service of Tuskline could be made, or it broke."""


class UntrustedServiceError(UnreachableError):
    """What answers at a service's address does not show a certificate of this service, so nothing was sent to it."""


class NotLeaderError(UnavailableError):
    """Another one of the log's repositories leads, or none does at the moment."""

    cause = Cause.NOT_LEADER


class OutvotedError(UnavailableError):
    """A safekeeper voted for another proposer, but none was elected: a campaign in a higher term resolves it."""


class NotSupportedError(TusklineError):
    """This version of Tuskline, or of a dependency, does not support the operation."""

    cause = Cause.NOT_SUPPORTED


class UnsupportedByCatalogError(NotSupportedError):
    """The catalog of a lake does not support an operation, whichever table that is for."""


class InvalidReplicaError(TusklineError):
    """A replica that may not report or commit until it has synchronized."""

    cause = Cause.INVALID_REPLICA


class LocalServerError(TusklineError):
    """A local PostgreSQL server could not be created, started or stopped."""

    cause = Cause.LOCAL_SERVER


class SchemaError(TusklineError):
    """A table's columns have changed since a reader began."""

    cause = Cause.SCHEMA


class SnapshotError(TusklineError):
    """An exported snapshot cannot be read, or can no longer be read."""

    cause = Cause.SNAPSHOT


class RunningError(TusklineError):
    """The parts are running, and the operation requires that they are not, such as a second start."""

    cause = Cause.RUNNING


class SpoolError(TusklineError):
    """The disk space for large transactions in progress is exhausted."""

    cause = Cause.SPOOL


class DiskFullError(TusklineError):
    """A disk is full, or a safekeeper's has less free space than configured. The part continues once there is space."""

    cause = Cause.DISK_FULL


class InvariantError(TusklineError):
    """An invariant of a part was violated by a step: a bug. The part stopped before it wrote anything of that step."""

    cause = Cause.INVARIANT


def _all_classes(root: type[TusklineError]) -> list[type[TusklineError]]:
    return [root, *(found for child in root.__subclasses__() for found in _all_classes(child))]


def _rebuild(kind: type[TusklineError], what: str, where: str, repair: str) -> TusklineError:
    return kind(what, where=where, repair=repair)


def of_cause(cause: Cause, what: str, *, where: str = "", repair: str = "") -> TusklineError:
    """An error of the class of its cause."""
    kind = next((k for k in _all_classes(TusklineError) if k.cause is cause), TusklineError)
    return kind(what, where=where, repair=repair)


def from_wire(record: dict[str, str]) -> TusklineError:
    """The error that a service sent with `TusklineError.to_wire`, as its own class."""
    cause = Cause.__members__.get(record.get("code", ""), Cause.INTERNAL)
    what, where, repair = (record.get(key, "") for key in ("what", "where", "repair"))
    return of_cause(cause, what, where=where, repair=repair)
