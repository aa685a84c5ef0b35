"""What the stream of each major tells of partitions that the catalog does not show, or does not show any more."""

import pytest

from spark_consumers.decode.entries import ChangeBatch, decode_entries
from spark_consumers.lake.manifest.table_version import TableVersion
from spark_consumers.lake.tables import noticed
from spark_consumers.lake.tables.chunks import missing
from spark_consumers.lake.tables.schema_match import unexpected
from spark_consumers.lake.tables.shape import Publication
from spark_consumers.lake.tables.sources import Source, read_publication
from tests.support.capture_model import xlog
from tests.support.servers import each_major
from walsender_bridge.capture import core, events
from walsender_bridge.change_log.client import LogEntry
from walsender_bridge.change_log.entry import schema_hash
from walsender_bridge.postgres.protocol.lsn import MAX_LSN, WalPosition

NAME = "shop.public.t"
SETUP = (
    "CREATE TABLE t (id int PRIMARY KEY, note text) PARTITION BY RANGE (id)",
    "CREATE TABLE t_a PARTITION OF t FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE t_m PARTITION OF t FOR VALUES FROM (100) TO (200) PARTITION BY RANGE (id)",
    "INSERT INTO t VALUES (1)",
    "CREATE PUBLICATION p FOR TABLE t",
    "ALTER PUBLICATION p SET (publish_via_partition_root = true)",
)
MAKE, FILL = (
    "CREATE TABLE t_b PARTITION OF t FOR VALUES FROM (200) TO (300)",
    "INSERT INTO t SELECT g FROM generate_series(201, 204) g",
)
DETACH, ATTACH = (
    "ALTER TABLE t DETACH PARTITION t_b",
    "ALTER TABLE t ATTACH PARTITION t_b FOR VALUES FROM (200) TO (300)",
)
LOOSE = "CREATE TABLE t_b (LIKE t INCLUDING ALL)"
BY_NOTE, BY_KEY = (
    "ALTER TABLE t_a REPLICA IDENTITY USING INDEX t_a_note",
    "ALTER TABLE t_a REPLICA IDENTITY DEFAULT",
)
#: What an UPDATE of the key changes is not told by it: the row's old key is not sent.
NOTED = (
    "UPDATE t SET note = 'x'",
    "ALTER TABLE t_a ALTER note SET NOT NULL",
    "CREATE UNIQUE INDEX t_a_note ON t_a (note)",
)
#: What is done before a look and after it, and a word of the reason for another copy, if there is one.
CASES = (
    ((), (MAKE, FILL, "DROP TABLE t_b"), "was dropped or detached"),
    ((), (f"BEGIN; {MAKE}; {FILL}; DROP TABLE t_b; COMMIT",), "was dropped or detached"),
    ((MAKE, FILL, "DROP TABLE t_b"), (), "was dropped or detached"),
    ((), (MAKE, FILL, DETACH), "was dropped or detached"),
    (
        (),
        (
            "CREATE TABLE t_m1 PARTITION OF t_m FOR VALUES FROM (100) TO (150)",
            "INSERT INTO t VALUES (101)",
            "DROP TABLE t_m1",
        ),
        "was dropped or detached",
    ),
    ((MAKE, FILL, DETACH, "DELETE FROM t_b", "VACUUM t_b", ATTACH), (), "was attached again"),
    ((), (MAKE, FILL), ""),
    ((MAKE,), (FILL,), ""),
    ((LOOSE, ATTACH), (FILL,), ""),
    ((), (LOOSE, ATTACH, "DROP TABLE t_b"), ""),
    (NOTED, (BY_NOTE, "UPDATE t SET id = 2", BY_KEY), "another replica identity"),
    ((*NOTED, BY_NOTE, "UPDATE t SET id = 2", BY_KEY), (), "another replica identity"),
    (NOTED, ("ALTER TABLE t_a REPLICA IDENTITY FULL", "UPDATE t SET id = 2", BY_KEY), ""),
    ((), ("INSERT INTO t VALUES (2)", "UPDATE t SET note = 'x'", "DELETE FROM t WHERE id = 1"), ""),
)  # fmt: skip


@each_major
@pytest.mark.parametrize("index", range(len(CASES)))
def test_a_partition_with_rows_that_no_look_has_seen_has_the_table_copied_again(database, index):
    if database.server.installation.major < 13:
        pytest.skip("partitions are published through their root since 13")
    before, after, word = CASES[index]
    database.execute(*SETUP)
    source = Source("shop", database.dsn, "p")
    [shape] = read_publication(source).shapes.values()
    table = TableVersion("p", "iceberg", 1, "", ("id",), (), 5, 1, 0, shape.oid, shape=shape.dump())
    with database.connect() as connection:
        connection.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        try:
            database.execute(*before)
            table = followed(table, read_publication(source, shape.relations))
            database.execute(*after)
            latest = read_publication(source, shape.relations)
            rows = connection.execute(
                "SELECT data FROM pg_logical_slot_peek_binary_changes('s', NULL, NULL, "
                "'proto_version', '1', 'publication_names', 'p')"
            ).fetchall()
        finally:
            connection.execute("SELECT pg_drop_replication_slot('s')")
    found = batches([bytes(data) for (data,) in rows])
    # The next look began after all this; where it did not, the one after it tells.
    for seen, looked in ((followed(table, latest), {"shop"}), (table, set[str]())):
        oids = {oid for batch in found for oid in unexpected(batch, noticed.partitions(seen))}
        tables, told = noticed.after_partition_changes({NAME: seen}, {NAME: oids}, looked)
        reason = told.get(NAME) or noticed.outdated(tables[NAME], latest.shapes["public.t"], latest)
        assert word in str(reason) if word else reason is None, (seen, looked)
    # A copy that was made after all this lacks nothing.
    assert not any(unexpected(missing(batch, MAX_LSN, (), (), ())[0], {}) for batch in found)


def followed(table: TableVersion, seen: Publication) -> TableVersion:
    now = seen.shapes["public.t"]
    assert noticed.outdated(table, now, seen) is None
    return noticed.followed_by(table, now, seen)


def batches(messages: list[bytes]) -> list[ChangeBatch]:
    """What capture and the decoder make of the messages of a slot."""
    state = core.CaptureState(
        timeline=1,
        logged_lsn=0,
        committed_lsn=0,
        previous_crc=0,
        confirmed=WalPosition(1, 0),
        now=0.0,
    )
    effects = core.step(state, events.CaptureTick(0.0, MAX_LSN))
    effects += core.step(
        state, events.CopyDataReceived(0.0, [xlog(message) for message in messages])
    )
    effects += core.step(state, events.CaptureTick(1.0, MAX_LSN))
    log: list[LogEntry] = []
    registry: dict[bytes, bytes] = {}
    while effects:
        effect = effects.pop(0)
        if isinstance(effect, events.AppendToReplica):
            registry |= {schema_hash(record): record for record in effect.schemas}
            for data in effect.entries:
                log.append(LogEntry(len(log) + 1, len(log) + 1, len(log) + 1, data))
            effects += core.step(state, events.Acknowledged(2.0, 0, 0, None))
    return list(decode_entries(log, registry.__getitem__, relations={"public.t"}))
