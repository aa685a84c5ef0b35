"""atheris on messages of a real server: whatever the bytes become, an error of ours, in little time and memory."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pinned import connect_pinned
from tests.support.servers import Database
from tests.support.slot_changes import PUBLICATION
from walsender_bridge.change_log.entry import schema_record
from walsender_bridge.postgres.protocol import pgoutput

#: Seconds for one input, MB for the process, bytes of an input.
TIMEOUT, MEMORY, LENGTH = 5, 1500, 4096
#: Seconds of one process: atheris itself keeps about 1.3 KB of each input (the same inputs without it: none), so
#: that the limit on memory would find nothing else after some minutes. The next process goes on from the corpus.
ROUND = 120
#: libFuzzer judges by ru_maxrss, which survives exec: without a fork by a small process, it is the test runner's own peak.
FORKED = ("/bin/sh", "-c", '"$@"; exit $?', "sh")
STATEMENTS = (
    "CREATE TYPE mood AS ENUM ('sad', 'ok')",
    (
        "CREATE TABLE t (id bigint PRIMARY KEY, note text, body bytea, n numeric(9,2), day date, yes bool,"
        " list text[], numbers int[], at timestamptz, u uuid, doc jsonb, feels mood)"
    ),
    "CREATE TABLE bag (a int, b text)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES",
)
CHANGES = (
    (
        "INSERT INTO t VALUES (1, 'a note', '\\x00ff', 1.5, '2024-02-29', true, '{a,NULL,\"b,c\"}',"
        " '{1,NULL}', now(), gen_random_uuid(), '{\"k\": [1, null]}', 'ok')"
    ),
    "INSERT INTO t (id) VALUES (2)",
    "UPDATE t SET note = 'other' WHERE id = 1",
    "UPDATE t SET id = 3 WHERE id = 2",
    "INSERT INTO bag VALUES (1, 'x'), (1, 'x')",
    "UPDATE bag SET b = NULL",
    "DELETE FROM bag",
    "TRUNCATE t, bag",
)


def captured(database: Database) -> list[list[bytes]]:
    """The messages of each transaction, from the server."""
    database.execute(*STATEMENTS)
    with connect_pinned(database.dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot('fuzz', 'pgoutput')")
        try:
            for change in CHANGES:
                connection.execute(change.encode())
            rows = connection.execute(
                "SELECT data FROM pg_logical_slot_peek_binary_changes('fuzz', NULL, NULL,"
                " 'proto_version', '1', 'publication_names', %s)",
                [PUBLICATION],
            ).fetchall()
        finally:
            connection.execute("SELECT pg_drop_replication_slot('fuzz')")
    found: list[list[bytes]] = [[]]
    for (data,) in rows:
        found[-1].append(bytes(data))
        if data[0] == pgoutput.COMMIT:
            found.append([])
    return found[:-1]


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris has no wheel for this machine's Python (docs/decisions/environment.md)",
)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seconds", [20, pytest.param(600, marks=pytest.mark.long)])
def test_malformed_pgoutput_is_refused_by_name_in_bounded_time_and_memory(
    tmp_path: Path, database: Database, seed: int, seconds: int
) -> None:
    corpus, schemas = tmp_path / "corpus", tmp_path / "schemas.json"
    corpus.mkdir()
    records: dict[int, str] = {}
    for number, messages in enumerate(captured(database)):
        for message in messages:
            if message[0] == pgoutput.RELATION:
                oid = pgoutput.relation_oid(message)
                records.setdefault(oid, schema_record(message, []).hex())
        framed = b"".join(len(each).to_bytes(2, "little") + each for each in messages)
        (corpus / f"transaction-{number}").write_bytes(framed)
    assert len(list(corpus.iterdir())) == len(CHANGES)
    schemas.write_text(json.dumps(records))
    print(f"seed {seed}")
    inputs = 0
    for started in range(0, seconds, ROUND):
        lasts = min(ROUND, seconds - started)
        done = subprocess.run(
            [
                *FORKED,
                *(sys.executable, "-m", "tests.fuzz.pgoutput_target", str(schemas)),
                *(f"-seed={seed + started}", f"-max_total_time={lasts}", f"-timeout={TIMEOUT}"),
                *(f"-rss_limit_mb={MEMORY}", f"-max_len={LENGTH}", f"-artifact_prefix={tmp_path}/"),
                *("-print_final_stats=1", str(corpus)),
            ],
            capture_output=True,
            text=True,
            timeout=lasts + 120,
        )
        told = done.stderr + done.stdout
        assert done.returncode == 0, told[-4000:]
        executed = re.search(r"number_of_executed_units: (\d+)", told)
        assert executed, told[-4000:]
        inputs += int(executed[1])
    print(f"{inputs} inputs, {len(list(corpus.iterdir()))} in the corpus")
    # It has run, and has found more ways through the code than it was given.
    assert inputs > 1000
    assert len(list(corpus.iterdir())) > 2 * len(CHANGES)
