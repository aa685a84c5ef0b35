"""docs/examples, as a user runs them: each a process beside one running installation."""

import contextlib
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest
from pyiceberg.table import StaticTable

from spark_consumers.spark import java
from tests.support.attached import Attached
from tests.support.servers import DEFAULT
from tests.support.spark_jvm import set_up
from walsender_bridge.demo.local_server import by_major
from walsender_bridge.demo.local_server.server import LocalServer

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

#: The view that the notebook reads, as it says.
VIEW = """
[[lake.view]]
name = "by_status"
sql = "SELECT status, count(*) AS orders FROM orders GROUP BY status"
"""

pytestmark = pytest.mark.timeout(600)


class Shop:
    """A server with the table `orders`, and Tuskline attached to it by the first example."""

    printed: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = LocalServer.create(
            by_major()[DEFAULT], folder / "server", settings={"fsync": "off"}
        )
        self.server.start()
        with psycopg.connect(self.server.dsn(), autocommit=True) as connection:
            connection.execute("CREATE DATABASE shop")
        self.sql(
            "CREATE TABLE orders (id int PRIMARY KEY, status text)",
            "INSERT INTO orders SELECT g, 'new' FROM generate_series(1, 50) AS g",
        )
        self.tuskline = Attached(
            folder, {"shop": {"dsn": self.server.dsn("shop")}}, lake=True, epoch_interval=1.0
        )
        with self.tuskline.config.open("a") as config:
            config.write(VIEW)
        self.log = f"grpc://{self.tuskline.log_listen}"

    def sql(self, *statements: str) -> None:
        with psycopg.connect(self.server.dsn("shop"), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def rows(self) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.server.dsn("shop")) as connection:
            return connection.execute("SELECT id, status FROM orders ORDER BY id").fetchall()

    def flush(self) -> None:
        done = self.tuskline.run("flush", "--timeout", "150", seconds=200)
        assert done.returncode == 0, done.stderr

    def example(self, name: str, *arguments: str) -> str:
        """What the program prints."""
        environment = {
            **os.environ,
            "JAVA_HOME": str(java.find().home),
            "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}",
            "SPARK_LOCAL_DIRS": str(self.folder / "scratch"),
        }
        set_up(environment)
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / name), *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with contextlib.ExitStack() as stack:
        made = Shop(tmp_path_factory.mktemp("examples"))
        stack.callback(made.server.destroy)
        stack.callback(made.tuskline.run, "down")
        made.printed = made.example("attach_and_read.py", str(made.tuskline.config))
        yield made


def test_attach_and_read_prints_the_rows_of_one_epoch(shop: Shop) -> None:
    *_, orders, view, status = shop.printed.splitlines()
    assert (orders, view, status) == (
        "shop.public.orders\t50",
        "shop.views.by_status\t1",
        "new\t50",
    )


@pytest.mark.long
def test_the_notebook_draws_freshness_and_lag_and_joins_a_stream(shop: Shop) -> None:
    notebook = json.loads((EXAMPLES / "freshness.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    # What a notebook would show: the value of each cell's last line.
    shown = "\nprint(_._repr_html_())\n"
    program = shop.folder / "notebook.py"
    program.write_text(
        "\n".join(re.sub(r"^Chart\(.*", rf"_ = \g<0>{shown}", c, flags=re.MULTILINE) for c in cells)
    )
    for status in ("paid", "sent"):
        shop.sql(f"UPDATE orders SET status = '{status}' WHERE id = 3")
        shop.flush()
    printed = shop.example(str(program))
    freshness, lag = re.findall(r"<svg.*?</p>", printed, re.DOTALL)
    assert freshness.count("<circle") + freshness.count("<polyline")
    assert {"shop: capture", "shop: merge"} <= set(re.findall(r"shop: \w+", lag))
    # The joined rows, and those of the view.
    assert re.search(r"\|\s*3\|\s*U\|\s*\d+\|\s*paid\|\s*sent\|", printed), printed[-3000:]
    assert re.search(r"\|\s*sent\|\s*1\|", printed)


@pytest.mark.long
def test_own_session_appends_each_change_once_over_two_runs(shop: Shop) -> None:
    target = shop.folder / "changes"

    def changes() -> list[tuple[Any, ...]]:
        """The changes of the order 700, as they were committed."""
        rows = pq.read_table(target / "files").sort_by("version").to_pylist()
        both = [(r["op"], dict(r["before"] or []), dict(r["after"] or [])) for r in rows]
        return [each for each in both if "700" in {each[1].get("id"), each[2].get("id")}]

    shop.sql("INSERT INTO orders VALUES (700, 'new')")
    shop.flush()
    shop.example("own_session.py", shop.log, str(target))
    first: list[tuple[Any, ...]] = [("I", {}, {"id": "700", "status": "new"})]
    assert changes() == first
    shop.sql(
        "UPDATE orders SET status = 'paid' WHERE id = 700", "DELETE FROM orders WHERE id = 700"
    )
    shop.flush()
    shop.example("own_session.py", shop.log, str(target))
    assert changes() == [
        *first,
        ("U", {}, {"id": "700", "status": "paid"}),
        ("D", {"id": "700"}, {}),
    ]


@pytest.mark.long
def test_merge_batches_keeps_its_table_equal_over_two_runs(shop: Shop) -> None:
    target = shop.folder / "mine"

    def merged() -> list[tuple[Any, ...]]:
        metadata = target / "shop" / "orders" / "metadata"
        newest = metadata / f"v{(metadata / 'version-hint.text').read_text()}.metadata.json"
        rows = StaticTable.from_metadata(str(newest)).scan().to_arrow().to_pylist()
        return sorted((row["id"], row["status"]) for row in rows)

    # The log knows a table from its first change on.
    shop.sql("INSERT INTO orders VALUES (600, 'new')")
    shop.flush()
    arguments = ("merge_batches.py", shop.log, str(shop.tuskline.lake), str(target))
    shop.example(*arguments)
    assert merged() == shop.rows()
    shop.sql(
        "INSERT INTO orders SELECT g, 'new' FROM generate_series(801, 820) AS g",
        "UPDATE orders SET status = 'paid' WHERE id % 3 = 0",
        # A key that changes, and one that another row gets.
        "UPDATE orders SET id = 900 WHERE id = 801",
        "INSERT INTO orders VALUES (801, 'again')",
        "DELETE FROM orders WHERE id % 10 = 5",
    )
    shop.flush()
    shop.example(*arguments)
    assert merged() == shop.rows()
    assert (801, "again") in merged()
