"""docs/tables.md: from a publication FOR ALL TABLES to one of Tuskline's own, with the commands as they are printed."""

import shutil
from pathlib import Path

import psycopg
import pytest

from spark_consumers import read
from spark_consumers.lake.manifest.chain import open_chain
from tests.support.attached import Attached, server_state
from tests.support.servers import MakeServer
from walsender_bridge.demo.local_server import by_major

TABLES = {"shop.public.orders", "shop.public.bills"}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "major",
    [
        pytest.param(major, marks=pytest.mark.long, id=f"PostgreSQL {major}")
        for major in sorted({min(by_major()), max(by_major())})
    ],
)
def test_the_way_to_a_publication_of_ones_own_loses_nothing(
    tmp_path: Path, make_server: MakeServer, spark, major: int
) -> None:
    server = make_server(major, fsync="off")
    server.start()

    def sql(*statements: str) -> None:
        with psycopg.connect(server.dsn("shop"), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)

    def change(n: int) -> None:
        sql(
            f"INSERT INTO orders SELECT g, {n} FROM generate_series({100 * n}, {100 * n + 9}) AS g",
            f"UPDATE orders SET note = {n} WHERE id % 3 = 0",
            f"DELETE FROM orders WHERE id = {100 * n + 5}",
            f"INSERT INTO bills VALUES ({n})",
        )

    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        connection.execute("CREATE DATABASE shop")
    sql(
        "CREATE TABLE orders (id int PRIMARY KEY, note int)",
        "CREATE TABLE bills (id int PRIMARY KEY)",
        "CREATE PUBLICATION tuskline_shop FOR ALL TABLES",
    )
    with Attached(tmp_path, {"shop": {"dsn": server.dsn("shop")}}, lake=True) as tuskline:

        def flushed() -> None:
            done = tuskline.run("flush", "--timeout", "150", seconds=200)
            assert done.returncode == 0, done.stderr + tuskline.logs()

        def paths() -> dict[str, str]:
            """Where each table's copy is."""
            found = open_chain(tuskline.lake).head()
            assert found is not None
            return {name: table.path for name, table in found.tables.items()}

        def same() -> None:
            snapshot = read(spark, str(tuskline.lake))
            for name in TABLES:
                with psycopg.connect(server.dsn("shop")) as connection:
                    table = name.rpartition(".")[2]
                    there = connection.execute(f"SELECT * FROM {table} ORDER BY id").fetchall()
                assert sorted(map(tuple, snapshot[name].collect())) == there
                assert snapshot.manifest.tables[name].rows == len(there)

        change(1)
        tuskline.json("init")
        tuskline.up()
        change(2)
        flushed()
        same()
        before = paths()

        old, new = tuskline.config, tmp_path / "new.toml"
        shutil.copy(old, new)
        with new.open("a") as file:  # in the last section, which is the [[source]]
            file.write('publication = "tuskline_own"\n')
        tuskline.config = new
        tuskline.json("init")
        tuskline.config = old
        change(3)
        flushed()
        change(4)
        assert tuskline.run("down").returncode == 0
        assert tuskline.process is not None
        assert tuskline.process.wait(60) == 0
        change(5)
        tuskline.config = new
        tuskline.up()
        change(6)
        flushed()
        same()
        after = paths()
        # Once: it is another publication than the one that the tables came by.
        assert not after.items() & before.items()
        sql("DROP PUBLICATION tuskline_shop", "CREATE TABLE bare (id int)")
        sql("INSERT INTO bare VALUES (1)", "UPDATE bare SET id = 2")
        change(7)
        flushed()
        same()
        assert paths() == after
        assert tuskline.run("status").returncode == 0
        assert tuskline.stop_up() == 0
        tuskline.json("detach")
        assert server_state(server.dsn("shop"))["slots"] == []
        assert server_state(server.dsn("shop"))["publications"] == []
