"""A streamed transaction that has committed goes from its spool file into the log.

It becomes what the server would have sent of it in one piece: a Begin, its changes in order, a Commit. Its
rows have the schemas that were sent in its blocks, and no others; what held outside of it holds again behind
it. Its entries are its own: what was buffered before is cut before.
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
    """What is left of it: `left` bytes of the file; then come the payloads that are `waiting`."""

    spooled: Spooled
    commit: pgoutput.Commit
    left: int
    #: The schemas outside of it, by OID: hashes, and records.
    outside: tuple[dict[int, bytes], dict[int, bytes]]
    waiting: list[bytes] = field(default_factory=list)

    @classmethod
    def start(cls, into: Entries, spooled: Spooled, commit: pgoutput.Commit) -> Self:
        """Begin the transaction."""
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
        """Take the file's next messages; True once that was the last of them."""
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
        assert self.left >= 0, "a spool file is longer than what was written to it"
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
                # Again the newest that the log has of this relation.
                into.new_schemas.append(into.records[oid])
        return True
