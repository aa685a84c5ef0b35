"""A row that PostgreSQL holds and no walsender can send: what a user sees of it, and the documented way out."""

from pathlib import Path

import psycopg
import pytest

from spark_consumers import read
from spark_consumers.lake.manifest.chain import open_chain
from tests.support.attached import Attached
from tests.support.waiting import wait_for
from walsender_bridge.errors import Cause

#: Its text has eight bytes for each of the value's own; the server needs 140 MB for the value, not gigabytes.
TOO_LARGE = f"INSERT INTO docs SELECT %s, {' || '.join(['b'] * 13)} FROM (SELECT 0::bit(83886080)::varbit) AS t (b)"
WORDS = "too large as text"


def rows(spark, tuskline: Attached, table: str) -> list[int]:
    done = tuskline.run("flush", "--timeout", "120", seconds=150)
    assert done.returncode == 0, done.stderr + tuskline.logs()
    return sorted(row.id for row in read(spark, tuskline.lake)[table].collect())


def wait_for_table(tuskline: Attached, table: str, database) -> None:
    def shown() -> bool:
        # A copy is shown with the next version, which a log without commits does not get.
        database.execute("UPDATE tuskline.flush SET token = token + 1")
        head = open_chain(tuskline.lake).head()
        return head is not None and table in head.readable

    wait_for(shown, 180, f"{table} is readable\n{tuskline.logs()}")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_row_too_large_to_send_is_named_and_a_new_source_name_leaves_it_behind(
    tmp_path: Path, database, spark
) -> None:
    database.execute("CREATE TABLE docs (id int PRIMARY KEY, bits varbit)")
    with database.connect() as admin:
        admin.execute(
            f'ALTER DATABASE "{database.name}" SET logical_decoding_work_mem = 64'.encode()
        )
    source = {"dsn": database.dsn, "tables": ["public.docs"]}
    with Attached(tmp_path, {"shop": source}, lake=True) as tuskline:
        tuskline.json("init")
        tuskline.up()
        wait_for_table(tuskline, "shop.public.docs", database)

        # Of a transaction in progress that is rolled back: nothing stops.
        with psycopg.connect(database.dsn) as client:
            client.execute(TOO_LARGE.replace("%s", "1").encode())
            client.execute("INSERT INTO docs SELECT g, '1' FROM generate_series(1000, 5000) AS g")
            wait_for(lambda: WORDS in tuskline.output.read_text(), 60, "the row is met")
            client.rollback()
        database.execute("INSERT INTO docs VALUES (2, '1')")
        assert rows(spark, tuskline, "shop.public.docs") == [2]

        # Committed: deleting it does not help, and it is said what does.
        database.execute(TOO_LARGE.replace("%s", "3"), "DELETE FROM docs WHERE id = 3")
        database.execute("INSERT INTO docs VALUES (4, '1')")

        def ended() -> list[str]:
            ill = tuskline.json("status", code=Cause.UNAVAILABLE)["problems"]
            return [word for word in ill if WORDS in word]

        wait_for(lambda: tuskline.run("status").returncode and ended(), 60, "status says so")
        (word,) = ended()
        assert word.startswith("capture of shop is stopped: the row changed at LSN ")
        assert "tuskline detach" in word
        (told,) = tuskline.json("status", code=Cause.UNAVAILABLE)["sources"]
        assert told["state"] == "stopped"
        assert WORDS in told["error"]
        findings = tuskline.json("doctor", code=Cause.UNSUPPORTED_VALUE)["findings"]
        (found,) = [each for each in findings if each["check"] == "capture"]
        assert WORDS in found["what"]
        assert "another source name" in found["repair"]

        # The way out.
        assert tuskline.stop_up() == 0
        tuskline.json("detach")
        text = tuskline.config.read_text().replace('name = "shop"', 'name = "shop_2"')
        tuskline.config.write_text(text)
        tuskline.json("init")
        tuskline.up()
        wait_for_table(tuskline, "shop_2.public.docs", database)
        database.execute("INSERT INTO docs VALUES (5, '1')")
        assert rows(spark, tuskline, "shop_2.public.docs") == [2, 4, 5]
        assert tuskline.run("status").returncode == 0
        assert tuskline.stop_up() == 0
