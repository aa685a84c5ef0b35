"""What a lake has besides its epochs works in a bucket, too: under load, below a prefix of many characters, with a maintainer that is killed."""

import json
import time
import uuid

import pytest

from spark_consumers import read
from spark_consumers.lake.flush import flush
from spark_consumers.lake.manifest.chain import open_chain
from tests.spark.test_lake_s3 import _source
from tests.spark.test_maintainer_crashes import maintain
from tests.support import bank_load
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.s3 import BUCKET, options_at
from tests.support.stack import Stack
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("s3_keys")]

LINES = """endpoint = "http://127.0.0.1:{port}"
region = "us-east-1"
allow_http = true
retention = 2.0
[lake.on_unrepresentable_value]
default = "quarantine"
[[lake.tables]]
pattern = "public.dated"
partition = ["year(at)", "bucket(4, id)"]
sort = ["id"]
[lake.maintenance]
interval = 0.2
file_bytes = 1048576
"""
DATED = (
    "CREATE TABLE dated (id int PRIMARY KEY, at date, note text)",
    "INSERT INTO dated SELECT g, '2023-06-01'::date + g, 'x' FROM generate_series(1, 400) g",
)


@pytest.mark.timeout(1500)
def test_pins_quarantine_partitions_copies_and_maintenance_work_in_a_bucket(
    tmp_path, database, spark, s3_port, seed
):
    store = options_at(s3_port)
    lake = f"s3://{BUCKET}/{uuid.uuid4().hex}/a b/100% ü+x/lake"
    database.execute(*bank_load.TABLES, *DATED)
    with Stack(
        tmp_path,
        {"shop": database.dsn},
        epoch_interval=0.5,
        lake=LINES.format(port=s3_port),
        uri=lake,
    ) as stack:

        def links():
            head = open_chain(lake, store).head()
            return head.link if head is not None and len(head.readable) == 4 else 0

        def more_links(count):
            until = links() + count
            wait_for(lambda: links() >= until, 240, "epochs")

        def told(*arguments):
            done = stack.cli(*arguments, "--json", seconds=240)
            assert done.returncode == 0, (arguments, done.stdout, done.stderr)
            return json.loads(done.stdout)

        stack.start("log-server", "bridge", "lake")
        wait_for(links, 300, "the first epoch")
        with bank_load.load(database.dsn, seed):
            told("epochs", "pin", "one")
            pinned = read(spark, lake, pin="one", store=store)
            rows = pinned["moves"].count()
            database.execute(
                "UPDATE dated SET note = 'y', at = at + 400 WHERE id % 3 = 0",
                "UPDATE dated SET at = 'infinity' WHERE id = 7",
            )
            for kills in range(5):
                process = maintain(stack)
                try:
                    more_links(2)
                finally:
                    process.kill()
                    process.wait()
                if kills == 2:
                    told("table", "resync", "shop.public.accounts")
            wait_for(
                lambda: [t["table"] for t in told("quarantine", "list")["quarantine"]],
                120,
                "the quarantined row",
            )
            again = read(spark, lake, pin="one", store=store)
            bank_load.check(again)
            assert (again.epoch, again["moves"].count()) == (pinned.epoch, rows)
            told("epochs", "unpin", "one")
            maintaining = maintain(stack)
        try:
            database.execute("UPDATE dated SET at = '2024-02-29' WHERE id = 7")
            flush(lake, stack.log_address, [_source(database)], timeout=240, store=store)
            wait_for(lambda: told("lake", "verify")["damaged"] == 0, 120, "a whole lake")
        finally:
            maintaining.terminate()
            assert maintaining.wait(60) == 0
        time.sleep(3)  # Longer than the retention: the next look removes what nobody needs.
        flush(lake, stack.log_address, [_source(database)], timeout=240, store=store)
        assert stack.stop("lake", 120) == 0
        shown = read(spark, lake, store=store)
        assert_equal(database.dsn, shown)
        bank_load.check(shown)
        assert told("quarantine", "list")["quarantine"] == []
        assert_no_orphans(spark, lake, store)
