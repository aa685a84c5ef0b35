"""`[lake.on_unrepresentable_value]` as a user meets it: by table, in a job that runs, in `table list` and in /metrics."""

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from spark_consumers import read
from spark_consumers.lake.manifest.chain import open_chain
from tests.support.attached import Attached
from tests.support.waiting import wait_for
from walsender_bridge.errors import Cause

SETUP = (
    "CREATE TABLE docs (id int PRIMARY KEY, price numeric(10,2))",
    "CREATE TABLE bills (id int PRIMARY KEY, price numeric(10,2))",
    "INSERT INTO docs VALUES (1, 1), (2, 'NaN')",
    "INSERT INTO bills VALUES (1, 1)",
)
DOCS, BILLS = "shop.public.docs", "shop.public.bills"


def flush(tuskline: Attached) -> None:
    done = tuskline.run("flush", "--timeout", "120", seconds=150)
    assert done.returncode == 0, done.stderr + tuskline.logs()


def counts(tuskline: Attached, table: str) -> tuple[int, int, int]:
    """Rows, quarantined rows that wait, and those that were given up, as /metrics and `table list` both have them."""
    url = f"http://{tuskline.metrics_listen}/metrics"
    with urllib.request.urlopen(url, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    served = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    names = ("rows", "quarantined_rows", "skipped_rows")
    found = [int(float(served[f'tuskline_lake_table_{n}{{table="{table}"}}'])) for n in names]
    (row,) = [each for each in tuskline.json("table", "list")["tables"] if each["table"] == table]
    assert [row[name] for name in names] == found
    return found[0], found[1], found[2]


def ready(tuskline: Attached) -> tuple[int, list[str]]:
    """What /readyz answers, and why."""
    try:
        with urllib.request.urlopen(
            f"http://{tuskline.metrics_listen}/readyz", timeout=30
        ) as answer:
            return answer.status, json.load(answer)["reasons"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["reasons"]


# `make test` has the policies in test_quarantine, and the configuration by command.
@pytest.mark.long
@pytest.mark.timeout(400)
def test_26_the_policy_of_each_table_in_a_job_that_runs(tmp_path: Path, database, spark) -> None:
    database.execute(*SETUP)
    tables = ["public.docs", "public.bills"]
    source = {"dsn": database.dsn, "tables": tables}
    with Attached(tmp_path, {"shop": source}, lake=True, metrics=True) as tuskline:
        plain = tuskline.config.read_text()
        tuskline.config.write_text(
            f'{plain}[lake.on_unrepresentable_value]\n"{DOCS}" = "quarantine"\n'
        )
        tuskline.json("init")
        tuskline.up()

        def shown() -> bool:
            head = open_chain(tuskline.lake).head()
            return head is not None and set(head.readable) == {DOCS, BILLS}

        wait_for(shown, 180, "both tables\n" + tuskline.logs())
        database.execute("INSERT INTO docs VALUES (3, 'NaN'), (4, 4)")
        flush(tuskline)
        wait_for(lambda: counts(tuskline, DOCS) == (2, 2, 0), 10, "two are set aside")
        assert counts(tuskline, BILLS) == (1, 0, 0)
        (row, _) = tuskline.json("quarantine", "list")["quarantine"]
        tuskline.json("quarantine", "skip", DOCS, row["row"], "--wait")
        wait_for(lambda: counts(tuskline, DOCS) == (2, 1, 1), 10, "one is given up")
        # By default nothing is: the table stops, and says why, until somebody decides; the other goes on.
        database.execute("INSERT INTO bills VALUES (2, 'NaN')", "INSERT INTO docs VALUES (5, 5)")
        refused = tuskline.run("flush", "--timeout", "120", seconds=150)
        assert refused.returncode == Cause.TIMEOUT, refused.stderr
        assert f"{BILLS} (stale: " in refused.stderr
        (word,) = tuskline.json("status", code=Cause.UNAVAILABLE)["problems"]
        for part in (BILLS, "public.bills.price", "NaN", f"tuskline table resume {BILLS}"):
            assert part in word
        wait_for(lambda: ready(tuskline) == (503, [word]), 30, "/readyz says so too")
        snapshot = read(spark, tuskline.lake)
        assert (set(snapshot), set(snapshot.stale)) == ({DOCS}, {BILLS})
        again = tuskline.run("table", "resume", BILLS, "--wait", "--timeout", "80")
        assert again.returncode == Cause.LAKE, "it has the same value again"
        assert "public.bills.price" in again.stderr
        # The way out that `status` names.
        assert tuskline.stop_up() == 0
        tuskline.config.write_text(
            f'{plain}[lake.on_unrepresentable_value]\ndefault = "quarantine"\n'
        )
        tuskline.up()
        done = tuskline.run("table", "resume", BILLS, "--wait", "--timeout", "120", seconds=150)
        assert done.returncode == 0, done.stderr + tuskline.logs()
        wait_for(lambda: tuskline.run("status").returncode == 0, 240, "all is well")
        flush(tuskline)
        wait_for(lambda: counts(tuskline, BILLS) == (1, 1, 0), 10, "it is set aside")
        assert counts(tuskline, DOCS) == (3, 1, 1)
        assert sorted(row.id for row in read(spark, tuskline.lake)["docs"].collect()) == [1, 4, 5]
        assert tuskline.stop_up() == 0
