"""Records of the id of a server's quorum: in a file of the bridge, and on the server itself.

The file is written when the id is drawn, and again when a majority of the first membership has it on disk, which is
before any COMMIT can have waited for it. The server's record is a row of `tuskline.provisioned`, which standbys replicate: it is
written if the role may (`tuskline quorum require --admin` writes it otherwise), and survives the loss of the bridge's
disk.

Two records that differ mean two quorums for one server: then no proposer starts. The file has a checksum, so that damage
is not mistaken for another quorum: then the server's record counts, and once a majority of its safekeepers has that id
on disk, the damaged file is renamed and a new one written. Files of earlier releases have no checksum, and are read.

The server's record may be locked by a transaction whose COMMIT waits for the quorum (REINDEX, VACUUM FULL), and so for
the proposer that reads it; a standby keeps such a lock until it is promoted. So the proposer never waits for it: the
bridge's file is enough, and on a standby the safekeepers at a majority of the addresses.
"""

import contextlib
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from walsender_bridge.errors import (
    ConnectionFailedError,
    CorruptError,
    DivergedError,
    TusklineError,
    UnavailableError,
)
from walsender_bridge.own_schema.provisioned import QUORUM, ProvisionedObject, ProvisionedRecord
from walsender_bridge.postgres.client.bounded_query import BoundedConnection
from walsender_bridge.postgres.client.replication_connection import (
    ANSWER_SECONDS,
    describe,
    pinned_conninfo,
)
from walsender_bridge.postgres.protocol.refusals import server_error
from walsender_bridge.postgres.standby_names import StandbyNames
from walsender_bridge.quorum.proposer.blocking_executor import BlockingExecutor
from walsender_bridge.quorum.proposer.primary.facts import PrimaryStream
from walsender_bridge.quorum.proposer.quorum_id import KnownQuorumId
from walsender_bridge.runtime import checksummed_json, json_model, logs, record_file
from walsender_bridge.runtime.folder import FolderDisk
from walsender_bridge.runtime.sql import load

_log = logs.logger()
_FORGET = (
    "find the proposer of the other quorum; see docs/quorum-lost.md on how to give up a quorum"
)
_AGAIN = "then tuskline down, tuskline up"
_DISK = "check the owner, the free space and the disk of its folder; the operation is retried"


@dataclass(frozen=True, slots=True)
class _Stored:
    """The bridge's file: the id in hexadecimal."""

    quorum: str
    formed: bool


def load_file(file: Path | None) -> KnownQuorumId:
    """The content of the bridge's file; empty, if there is none. Raises `CorruptError`, `UnavailableError` (not now)."""
    if file is None:
        return KnownQuorumId()
    try:
        stored = json_model.from_plain(_Stored, checksummed_json.load(file, checked=False))
        return KnownQuorumId(int(stored.quorum, 16), stored.formed)
    except FileNotFoundError:
        return KnownQuorumId()
    except OSError as error:
        raise UnavailableError(
            f"could not read the quorum's id: {error.strerror}", where=str(file), repair=_DISK
        ) from None
    except (ValueError, TypeError) as error:
        raise CorruptError(
            f"invalid record of the quorum's id: {error}",
            where=str(file),
            repair=f"remove the file while the safekeepers of its quorum run, {_AGAIN}: the proposer reads the id from them",
        ) from error


def _record(known: KnownQuorumId) -> dict[str, Any]:
    return json_model.plain(_Stored(f"{known.quorum:032x}", known.formed))


def save_file(file: Path, known: KnownQuorumId) -> None:
    """Write the file, durably. Raises `UnavailableError`."""
    try:
        checksummed_json.save(file, _record(known))
    except OSError as error:
        raise UnavailableError(
            f"could not record the quorum's id: {error.strerror}", where=str(file), repair=_DISK
        ) from None


def known_on(asked: PrimaryStream, file: Path | None, application_name: str) -> KnownQuorumId:
    """The records of the quorum at the bridge and on the server.

    Raises `DivergedError` when they differ; and, when the other record is missing, `UnavailableError` while the server's
    record is locked or the bridge's is unreadable, and `CorruptError` when the bridge's is damaged.
    """
    own = KnownQuorumId()
    damage: TusklineError | None = None
    try:
        own = load_file(file)
    except (CorruptError, UnavailableError) as error:
        damage = error
    recorded = _recorded(asked, is_enough=own.formed)
    others = recorded - {own.quorum} if own.formed or len(recorded) > 1 else set()
    if others:
        mine = f"this bridge's quorum is {own.quorum:032x}" if own.formed else "its records differ"
        raise DivergedError(
            f"another quorum is recorded on this server: {min(others):032x}; {mine}",
            where=asked.where,
            repair=_FORGET + (f"; if {file} alone is wrong, remove it, {_AGAIN}" if file else ""),
        )
    if damage is not None and not recorded:
        raise damage
    ((names,),) = asked.command("SHOW synchronous_standby_names", timeout=ANSWER_SECONDS)
    required = StandbyNames.parse(names or "").names_it(application_name)
    if recorded:
        return KnownQuorumId(recorded.pop(), formed=True, required=required)
    return KnownQuorumId(own.quorum, own.formed, required)


def _recorded(asked: PrimaryStream, *, is_enough: bool) -> set[int]:
    """The ids recorded on the server. `is_enough`: the bridge's own record suffices."""
    owner = _rows(asked, "own_schema/provisioned_owner")
    if not owner or owner[0][3] != "t":
        return set()
    for name, role, trusted, *_ in _rows(asked, "own_schema/owners"):
        if trusted != "t":
            reason = (
                f"{name} belongs to role {role}, whose code would run there with this role's rights"
            )
            _log.warning("did not read the quorum's id from the server", reason=reason)
            return set()
    for pid, query in _rows(asked, "quorum/locked"):
        _pass_over(asked, pid, query, is_enough=is_enough)
        return set()
    _rows(asked, "quorum/lock_timeout")
    return {int(name, 16) for (name,) in _rows(asked, "quorum/id") if name}


def _pass_over(
    asked: PrimaryStream, pid: str | None, query: str | None, *, is_enough: bool
) -> None:
    """The record is locked. Raises `UnavailableError` where there is no other record of the id."""
    holder = (
        f"process {pid}" + (f" ({query})" if query else "") if pid else "a prepared transaction"
    )
    what = f"tuskline.provisioned, which records the quorum's id, is locked by {holder}"
    _log.warning("did not read the quorum's id from the server", reason=what)
    ((standby,),) = asked.command("SELECT pg_is_in_recovery()", timeout=ANSWER_SECONDS)
    if is_enough or standby == "t":
        return
    end = f"SELECT pg_cancel_backend({pid})" if pid else "see pg_prepared_xacts"
    repair = f"restore the bridge's quorum-id.json; or, if the lock belongs to maintenance, end that: {end}"
    raise UnavailableError(what, where=asked.where, repair=repair)


def _rows(asked: PrimaryStream, name: str) -> list[tuple[str | None, ...]]:
    return asked.command(load(name).strip().rstrip(";"), timeout=ANSWER_SECONDS)


def draw(file: Path | None) -> int:
    """An id for a membership that has none: the one of an earlier attempt, or a new one, durably recorded."""
    own = load_file(file)
    if own.quorum:
        return own.quorum
    quorum = int.from_bytes(os.urandom(16), "big") or 1
    if file is not None:
        save_file(file, KnownQuorumId(quorum))
    return quorum


class QuorumRecord:
    """The record as a session of the bridge's proposer writes it. A failover has no file, and records nothing.

    `formed`: the quorum was recorded when the session began, perhaps on the server: then a failing disk of the bridge does
    not end the session.
    """

    def __init__(
        self,
        file: Path | None,
        dsn: str,
        slot: str,
        executor: BlockingExecutor,
        *,
        formed: bool = False,
    ) -> None:
        self._file = file
        self._dsn = dsn
        self._slot = slot
        self._executor = executor
        self._formed = formed

    def settled(self, quorum: int) -> None:
        """A majority has the quorum's id on disk. On return it is durable here or on the server; writing the latter is queued."""
        known = KnownQuorumId(quorum, formed=True)
        if self._file is None:
            return
        try:
            _settle(self._file, known)
        except UnavailableError as error:
            if not self._formed:
                raise
            _log.warning("recorded the quorum's id on the server only", reason=error.what)
        self._executor.ask(partial(_tell_server, self._dsn, self._slot, quorum), _told)


def _settle(file: Path, known: KnownQuorumId) -> None:
    """Write the file. A damaged one is renamed first. Raises `UnavailableError`."""
    with contextlib.suppress(OSError):
        if file.read_bytes() == checksummed_json.sealed(_record(known)):
            return
    try:
        load_file(file)
    except CorruptError as error:
        with contextlib.suppress(OSError):
            aside = record_file.keep_aside(FolderDisk(file.parent), file.name)
            _log.warning(
                "rewriting the damaged file of the quorum's id",
                where=str(file),
                reason=error.what,
                kept_as=aside,
            )
    save_file(file, known)


def _told(result: TusklineError | None) -> None:
    if isinstance(result, DivergedError):
        raise result
    if result is not None:
        _log.warning("could not record the quorum's id on the server", reason=result.what)


def _tell_server(dsn: str, slot: str, quorum: int) -> None:
    """Record the id on the server, if the role may and none is recorded there. Blocks: runs in the blocking executor.

    Raises `DivergedError` when another id is recorded, and errors of the server.
    """
    conninfo = pinned_conninfo(dsn, application_name="tuskline-quorum-id")
    try:
        with BoundedConnection.connect(conninfo, autocommit=True) as connection:
            connection.execute(load("quorum/session").encode())
            connection.execute(load("quorum/lock_timeout").encode())
            record = ProvisionedRecord(connection, slot, dsn)
            if not record.readable:
                return
            found = record.quorum_ids()
            if not found:
                record.add(ProvisionedObject(QUORUM, f"{quorum:032x}"))
    except psycopg.Error as error:
        if error.sqlstate is None:
            raise ConnectionFailedError(str(error), where=describe(dsn)) from None
        raise server_error(error.sqlstate, str(error), describe(dsn)) from None
    if found and quorum not in found:
        raise DivergedError(
            f"another quorum is recorded on this server: {min(found):032x}",
            where=describe(dsn),
            repair=_FORGET,
        )
