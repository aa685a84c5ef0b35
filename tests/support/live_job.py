"""A program with a JVM of its own that reads live, for tests of what it leaves behind.

python -m tests.support.live_job LAKE LOG EVENTS [sent|executors|stored]

Reads once, queries every table and prints `READ VERSION`. Once there is a file `query` in EVENTS, it prints `QUERYING`, runs a query
that takes some seconds, and prints `ANSWER` with the documents. `EVENTS`: the folder of Spark's event log. `executors`, `stored`: as if
the tail were larger.
"""

import json
import sys
import time
from pathlib import Path
from unittest import mock

from spark_consumers import read
from spark_consumers.lake.epoch import plan
from spark_consumers.lake.live import log_tail
from spark_consumers.spark.session import session
from tests.support import table_format


def main(lake: str, log: str, events: str, how: str = "sent") -> None:
    """See the module."""
    conf = {
        "spark.driver.memory": "600m",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": f"file://{events}",
        "spark.log.level": "INFO",
    }
    small = mock.patch.multiple(plan, RANGE_BYTES=1, COMPOSED_RANGES=2)
    # What is sent is then composed by the executors.
    sent = mock.patch.multiple(log_tail, _OWN=-1)
    spark = session("live job", lake=lake, conf=conf)
    if how == "stored":
        small.start()
    elif how == "executors":
        sent.start()
    found = read(spark, lake, live=True, log=log)
    for view in found.register_views("now"):
        spark.sql(f"SELECT * FROM {view}").collect()
        spark.sql(f"EXPLAIN EXTENDED SELECT * FROM {view}").collect()
    print("READ", found.epoch, flush=True)
    while not Path(events, "query").exists():
        time.sleep(0.1)
    print("QUERYING", flush=True)
    slow = "count_if(pmod(hash(d.id, r.id), 97) = 5) > 0"
    asked = f"SELECT d.id, first(d.title) AS title, {slow} AS s FROM now_public_docs d CROSS JOIN range(1500000) r"
    rows = spark.sql(f"{asked} GROUP BY d.id ORDER BY d.id").collect()
    print("ANSWER", json.dumps([[row.id, row.title] for row in rows]), flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    table_format.use_in_this_process()
    main(*sys.argv[1:])
