"""The RESTART entry: the end of a stream's history and the start of another, when its source is reattached. Pure.

After a lost slot, or on another cluster, the server's changes do not continue the stream. `tuskline reattach` creates a
new slot and appends this entry, in one durable step with the slot's position and the cluster's system identifier. From there
on the stream is like a new one, with unrelated LSNs, except that offsets and versions continue: an offset never has
two meanings, and a reader that stopped below `history_start` detects by comparing two numbers that its history has ended
(`spark_consumers.sources.history`). A full resync of the tables follows.

The entry directly follows the committed entries. An uncommitted tail before it would belong to a history without
continuation: no consumer has seen it, and it is cut off first. The entry itself is never cut off: otherwise the recorded
position and cluster would appear to continue the previous history, and the changes in between would be missing
silently. No gate holds it back, so it is committed by itself, in a commit of its own: readers start behind it.
"""

from collections.abc import Sequence

from walsender_bridge.change_log.entry import Codec, EntryHeader, EntryKind, build_entry
from walsender_bridge.change_log.protocol import Position
from walsender_bridge.change_log.replica.disk import Tail
from walsender_bridge.errors import InvalidReplicaError, MalformedMessageError
from walsender_bridge.postgres.protocol.lsn import WalPosition


def build_restart(previous_crc: int) -> bytes:
    """The entry, behind one with this checksum."""
    return build_entry(
        [],
        timeline=0,
        previous_crc=previous_crc,
        schema_hashes={},
        kind=EntryKind.RESTART,
        codec=Codec.NONE,
    )


def is_restart(
    headers: Sequence[EntryHeader],
    tail: Tail,
    committed_end: int,
    confirm_to: WalPosition | None,
    system_id: int | None,
) -> bool:
    """Whether these entries, to be appended behind `tail`, are a RESTART. Raises `MalformedMessageError` for a wrong one."""
    if all(header.kind != EntryKind.RESTART for header in headers):
        return False
    if len(headers) != 1 or confirm_to is None or system_id is None:
        raise MalformedMessageError(
            "a RESTART entry comes alone, with the new slot's position and the system identifier",
            where=f"entry {tail.end_offset}",
        )
    if tail.end_offset != committed_end:
        raise MalformedMessageError(
            f"a RESTART entry, and only {committed_end} is committed",
            where=f"entry {tail.end_offset}",
        )
    return True


def check_cut(tail: Tail, committed: Position) -> None:
    """Raise `InvalidReplicaError` if there is a RESTART in the uncommitted tail, which is to be cut off."""
    if tail.whole.history_start > committed.history_start:
        raise InvalidReplicaError(
            f"the RESTART entry before {tail.whole.history_start} is not committed yet",
            where=f"entry {tail.end_offset}",
            repair="try again; it is committed by itself while the log runs",
        )
