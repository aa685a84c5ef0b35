"""What a logical slot holds, as entries of a change log: the way of capture, without its processes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.change_entries import Entries
from tests.support.pinned import connect_pinned
from walsender_bridge.change_log.client import LogEntry
from walsender_bridge.change_log.entry import build_entry, read_header, schema_hash, schema_record
from walsender_bridge.postgres.protocol import pgoutput

PUBLICATION = "pub"


@contextmanager
def changes_of(dsn: str) -> Iterator[Callable[[], Entries]]:
    """A slot that sees everything from here on; calling gives what it has seen so far, from its start."""
    name = "slot_changes"
    with connect_pinned(dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])

        def peek() -> Entries:
            rows = connection.execute(
                "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, "
                "'proto_version', '1', 'publication_names', %s)",
                [name, PUBLICATION],
            ).fetchall()
            return entries(bytes(data) for (data,) in rows)

        try:
            yield peek
        finally:
            connection.execute("SELECT pg_drop_replication_slot(%s)", [name])


def entries(messages: Iterator[bytes]) -> Entries:
    """Each transaction as an entry of its own, or as several where a schema changes in it, as capture cuts them."""
    log = Entries()
    hashes: dict[int, bytes] = {}
    types: dict[int, bytes] = {}
    waiting: list[bytes] = []

    def cut() -> None:
        previous = read_header(log.entries[-1].data).crc if log.entries else 0
        data = build_entry(waiting, timeline=1, previous_crc=previous, schema_hashes=hashes)
        offset = len(log.entries) + 1
        log.entries.append(LogEntry(offset, offset, offset, data))
        waiting.clear()

    for message in messages:
        if message[0] == pgoutput.TYPE:
            types[pgoutput.relation_oid(message)] = message
        elif message[0] == pgoutput.RELATION:
            used = {column.type_oid for column in pgoutput.parse_relation(message).columns}
            record = schema_record(message, [types[oid] for oid in used & set(types)])
            oid, digest = pgoutput.relation_oid(message), schema_hash(record)
            if waiting and hashes.get(oid, digest) != digest:
                cut()
            hashes[oid] = digest
            log.registry[digest] = record
        else:
            waiting.append(message)
        if message[0] == pgoutput.COMMIT:
            cut()
    return log
