"""Replays a streamed transaction that has committed from its spool file into the log.

It takes the form in which the server would have sent it after COMMIT: a Begin, its changes in order, a Commit. Its
rows have the schemas that were sent in its blocks, and no others; the schemas from before the transaction apply again after
it. It has entries of its own: what was buffered before it is cut first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from walsender_bridge.capture import entries
from walsender_bridge.capture.entries import PREFIX, Entries
from walsender_bridge.capture.spool.core import Spooled
from walsender_bridge.postgres.protocol import pgoutput


@dataclass(slots=True)
class Replay:
    """The remainder of the replay: `left` bytes of the file, then the deferred payloads (`waiting`)."""

    spooled: Spooled
    commit: pgoutput.Commit
    left: int
    #: The schemas outside the transaction, by OID: hashes and records.
    outside: tuple[dict[int, bytes], dict[int, bytes]]
    waiting: list[bytes] = field(default_factory=list)

    @classmethod
    def start(cls, into: Entries, spooled: Spooled, commit: pgoutput.Commit) -> Self:
        """Start the replay."""
        into.cut_all()
        outside = (into.schema_hashes, into.records)
        replay = cls(spooled, commit, spooled.length, outside)
        into.schema_hashes, into.records = {}, {}
        begin = pgoutput.build_begin(
            pgoutput.Begin(commit.commit_lsn, commit.commit_time, spooled.xid)
        )
        into.buffer.append(begin)
        into.buffer_bytes = len(begin) + PREFIX
        return replay

    def take(self, into: Entries, messages: Sequence[bytes]) -> bool:
        """Append the file's next messages; return True after the last of them."""
        buffer, buffered, limit = into.buffer, into.buffer_bytes, entries.ENTRY_BYTES
        for message in messages:
            size = len(message) + PREFIX
            self.left -= size
            if message[0] == pgoutput.RELATION:
                into.buffer_bytes = buffered
                into.relation(message)
                buffered = into.buffer_bytes
            elif message[0] == pgoutput.TYPE:
                into.types[pgoutput.relation_oid(message)] = message
            else:
                if buffered + size > limit:
                    buffered = into.room(buffered, size)
                buffer.append(message)
                buffered += size
        into.buffer_bytes = buffered
        assert self.left >= 0, "spool file is longer than the data written to it"
        if self.left:
            return False
        commit = pgoutput.build_commit(self.commit)
        size = len(commit) + PREFIX
        into.buffer_bytes = into.room(buffered, size) + size
        buffer.append(commit)
        into.end_transaction(self.commit.end_lsn, into.buffer_bytes)
        into.cut_all()
        inside = into.schema_hashes
        into.schema_hashes, into.records = self.outside
        for oid, digest in inside.items():
            if into.schema_hashes.get(oid, digest) != digest:
                # Restore it as the newest schema that the log has of this relation.
                into.new_schemas.append(into.records[oid])
        return True
