"""`tuskline reattach`: start another history, under the same names, for a source whose stream cannot continue.

First the server's objects are created as by `init`, after dropping the old slot; then one RESTART entry with the new
slot's position is appended to the log (`change_log.restart`). A crash in between leaves a slot that does not continue the log,
which `reason` detects; the command is then run again, and only the slot is created twice. Capture streams from the entry on,
and the lake brings this source's tables level, or copies them.

A stream that can continue is left as it is, since a new history costs a comparison of all its tables.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import psycopg

from walsender_bridge.capture import publication, stream_record
from walsender_bridge.capture import source as capture
from walsender_bridge.capture.session_setup import settle
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.change_log.client import LogClient, ReplicaClient, StreamWriter
from walsender_bridge.change_log.restart import build_restart
from walsender_bridge.errors import (
    DeadlineError,
    FencedError,
    LostSlotError,
    SlotError,
    SlotInUseError,
    UnavailableError,
)
from walsender_bridge.own_schema.provisioned import ProvisionedRecord
from walsender_bridge.postgres.client.hosts import same_server
from walsender_bridge.postgres.client.replication_connection import ReplicationConnection
from walsender_bridge.postgres.protocol.lsn import WalPosition
from walsender_bridge.postgres.protocol.replication import ServerTimelines, SystemIdentity
from walsender_bridge.provisioning.detach import drop_slot
from walsender_bridge.provisioning.init import as_admin, init
from walsender_bridge.runtime.sql import load

#: Seconds to wait for the log's answer, and for the commit of the entry.
ANSWER_SECONDS = 60.0
#: Attempts, since another writer (a capture that retries) may interfere.
_ATTEMPTS = 10


def reason(source: CaptureSource, log: LogClient, admin: str | None = None) -> str | None:
    """Why the source's stream cannot continue; None if nothing prevents it, or if it has not started yet.

    `admin` as for `init`: on another cluster the source's role may be missing. Raises errors that prevent the check.
    """
    position = stream_record.of_log(log, source.name)
    if position is None or not position.begun:
        return None
    seen = as_admin(source, admin)
    with capture.connect(seen) as connection:
        identity, history = _identity(connection, seen)
        # On another cluster this explains everything else that is missing.
        fork = capture.evaluate(position, 0, identity, history)
        if fork is not None:
            return fork.reason
        try:
            confirmed = capture.slot_position(connection, seen)
        except LostSlotError as error:
            return error.what
        except SlotInUseError:
            confirmed = 0
        fork = capture.evaluate(position, confirmed, identity, history)
        if fork is not None:
            return fork.reason
        record = ProvisionedRecord(connection, source.slot, source.dsn)
        found = publication.facts(connection, seen)
        return publication.recorded_fault(connection, seen, record, found) or None


def reattach(source: CaptureSource, log: LogClient, admin: str | None = None) -> None:
    """Recreate publication and slot, and start another history in the log.

    `admin` as for `init`. Raises `SlotInUseError` while another client streams from the slot, and the errors of `init`.
    """
    with capture.connect(as_admin(source, admin)) as connection:
        _drop_slot(connection, source)
    init(source, admin)
    with capture.connect(source) as connection:
        identity, _ = _identity(connection, source)
        confirmed = capture.slot_position(connection, source)
    if confirmed is None:
        raise SlotError(
            "the slot has been dropped again", where=f"{source.where}, slot {source.slot}"
        )
    for attempt in range(_ATTEMPTS):
        try:
            _restart(source, log, WalPosition(identity.timeline, confirmed), identity.system_id)
        except FencedError:
            # Capture retries every few seconds, as a new writer each time.
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(0.2)
        else:
            break


def _drop_slot(connection: psycopg.Connection[Any], source: CaptureSource) -> None:
    """Drop the slot if capture could have used it."""
    with suppress(LostSlotError, SlotInUseError):
        # Its walsender may not have detected yet that the client has disconnected.
        if capture.slot_position(connection, source) is None:
            return
    for attempt in range(_ATTEMPTS):
        # The source's capture may still be streaming, and reconnects.
        names = {"slot": source.slot, "capture": capture.application_name(source)}
        ended = connection.execute(load("provisioning/capture_end").encode(), names).fetchall()
        try:
            drop_slot(connection, source)
        except SlotInUseError as error:
            if ended and attempt < _ATTEMPTS - 1:
                continue
            raise SlotInUseError(
                error.what,
                where=error.where,
                repair="terminate that session: SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name ="
                f" '{source.slot}'; then tuskline reattach again",
            ) from None
        else:
            return


def _restart(
    source: CaptureSource, log: LogClient, confirm_to: WalPosition, system_id: int
) -> None:
    """Append the RESTART entry behind what is committed, and wait for its commit."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        offset = _append_restart(source.name, log, confirm_to, system_id)
        if _is_committed(source.name, log, offset, deadline):
            return


def _append_restart(name: str, log: LogClient, confirm_to: WalPosition, system_id: int) -> int:
    """Append the entry; its local offset."""
    with (
        ReplicaClient(log.status().streams[name].addresses[0]) as replica,
        _writer(log, name) as writer,
    ):
        if writer.status.end_offset > writer.status.committed_end:
            settle(writer, log, ANSWER_SECONDS)
            end = replica.stream_status(name).committed_end
            replica.cut_tail(name, writer.term, end)
    with _writer(log, name) as writer:
        entry = build_restart(writer.status.last_crc)
        writer.send([entry], confirm_to=confirm_to, gate_lsn=0, system_id=system_id)
        if writer.next_ack(ANSWER_SECONDS) is None:
            raise UnavailableError("log server does not answer", where=writer.address)
        return writer.status.end_offset


def _is_committed(name: str, log: LogClient, offset: int, deadline: float) -> bool:
    """Whether the entry is committed; False if it was removed, as the stream was sealed to go on with other replicas."""
    while True:
        cut = log.status().streams[name]
        if cut.history_start > offset:
            return True
        with ReplicaClient(cut.addresses[0]) as replica:
            if replica.stream_status(name).end_offset <= offset:
                return False
        if time.monotonic() > deadline:
            raise DeadlineError(
                "the log has not committed the RESTART entry",
                where=f"stream {name}",
                repair="run `tuskline doctor`, then run this command again",
            )
        time.sleep(0.05)


@contextmanager
def _writer(log: LogClient, name: str) -> Iterator[StreamWriter]:
    writer = log.open_writer(name)
    try:
        yield writer
    finally:
        writer.close()


def _identity(
    connection: psycopg.Connection[Any], source: CaptureSource
) -> tuple[SystemIdentity, ServerTimelines]:
    """The identity of the server of this connection; with several hosts, another connection could reach another server."""
    here = replace(source, dsn=same_server(source.dsn, connection))
    name = f"tuskline-reattach-{source.name}"
    with ReplicationConnection.connect(here.dsn, application_name=name) as walsender:
        identity = walsender.identify()
        return identity, walsender.history(identity.timeline)
