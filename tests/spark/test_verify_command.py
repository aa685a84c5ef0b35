"""`tuskline verify` as a user runs it: beside `up`, killed in the middle, and run again."""

import json
import signal
import subprocess
from typing import Any

import psycopg

from spark_consumers.lake.equality.record import read_record
from spark_consumers.lake.manifest.chain import open_chain
from tests.support.attached import CLI, Attached
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for


def test_verify_is_killed_continues_and_status_shows_its_result(tmp_path, make_server: MakeServer):
    server = make_server(fsync="off")
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE big (id int PRIMARY KEY, t text)")
        connection.execute(
            "INSERT INTO big SELECT g, repeat('x', 900) FROM generate_series(1, 400000) g"
        )
        connection.execute("CREATE TABLE small (a text)")
        connection.execute("ALTER TABLE small REPLICA IDENTITY FULL")
        connection.execute("INSERT INTO small VALUES ('A'), ('a '), (NULL), (NULL)")
    source = {"dsn": server.dsn(), "tables": ["public.big", "public.small"]}
    with Attached(tmp_path, {"shop": source}, lake=True) as tuskline:
        tuskline.json("init")
        tuskline.up()
        tuskline.json("flush")
        chain = open_chain(tuskline.lake)
        command = [*CLI, "verify", "--config", str(tuskline.config), "--load", "0.05"]
        with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:

            def begun() -> bool:
                record = read_record(chain)
                return record is not None and any(t.chunks for t in record.tables.values())

            wait_for(begun, 120, "the run has begun")
            process.send_signal(signal.SIGKILL)
        left = read_record(chain)
        assert left is not None
        assert not left.ended_at
        done = tuskline.run("verify", "--json", seconds=240)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert {t["table"]: (t["result"], t["rows"]) for t in found["tables"]} == {
            "shop.public.big": ("equal", 400_000),
            "shop.public.small": ("equal", 4),
        }
        assert found["seed"] == left.seed, "the same run"
        assert tuskline.json("status")["lake"]["equality"]["equal"] == 2
