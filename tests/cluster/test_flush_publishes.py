"""`tuskline flush` right after CREATE TABLE: it publishes what capture would publish with its next look."""

import re
import threading
import time
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from spark_consumers.lake.flush import flush, force_barrier
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.tables.sources import Source
from tests.support.servers import Database
from walsender_bridge.capture import publication
from walsender_bridge.capture import source as capture
from walsender_bridge.cli.flush import publish_new
from walsender_bridge.config import SourceSection
from walsender_bridge.errors import (
    AuthenticationError,
    DeadlineError,
    PublicationError,
    UnavailableError,
)
from walsender_bridge.provisioning.configured import capture_source
from walsender_bridge.provisioning.detach import detach
from walsender_bridge.provisioning.init import init

SECRET = "planted-secret-3e80"


def section_of(dsn: str) -> SourceSection:
    return SourceSection(name="shop", dsn=dsn)


def published(database: Database) -> set[str]:
    with database.connect() as connection:
        query = "SELECT tablename FROM pg_publication_tables WHERE pubname = 'tuskline_shop'"
        return {name for (name,) in connection.execute(query.encode()).fetchall()}


def soon() -> float:
    return time.monotonic() + 60


def test_a_new_table_is_published_before_the_flush_waits(shop: Database) -> None:
    section = section_of(shop.dsn)
    init(capture_source(section))
    assert publish_new(section, soon()) == ()
    shop.execute("CREATE TABLE late (id int PRIMARY KEY)", "CREATE TABLE bare (id int)")
    (note,) = publish_new(section, soon())
    assert "late" in published(shop)
    assert "public.bare left out" in note
    detach(capture_source(section))


def test_a_changed_password_is_named_as_such(tmp_path: Path, shop: Database) -> None:
    """Whoever waits for an answer would wait for ever: this is not a server that does not answer."""
    open_chain(tmp_path).initialise("a log", "iceberg")
    wrong = make_conninfo(shop.dsn, password=SECRET)
    with pytest.raises(AuthenticationError, match="password") as raised:
        flush(str(tmp_path), "127.0.0.1:1", [Source("shop", wrong, "tuskline_shop")])
    assert raised.value.where == "shop"
    assert SECRET not in str(raised.value)
    with pytest.raises(AuthenticationError, match="password"):
        force_barrier("127.0.0.1:1", {"shop": wrong})


def test_a_publication_without_updates_is_named_with_the_statement_that_mends_it(
    tmp_path: Path, shop: Database, free_port: int
) -> None:
    section = section_of(shop.dsn)
    init(capture_source(section))
    shop.execute("ALTER PUBLICATION tuskline_shop SET (publish = 'insert')")
    open_chain(tmp_path).initialise("a log", "iceberg")
    source = Source(section.name, section.dsn, section.publication_name)

    def flushed() -> None:
        flush(str(tmp_path), f"grpc://127.0.0.1:{free_port}", [source], timeout=5)

    with pytest.raises(PublicationError, match="does not publish UPDATEs") as told:
        flushed()
    statement = re.search("ALTER PUBLICATION .*?;", told.value.repair)
    assert statement is not None
    shop.execute(statement[0])
    with pytest.raises(UnavailableError):
        # No log runs here: it is asked now.
        flushed()
    detach(capture_source(section))


def test_a_new_table_that_is_locked_is_waited_for_and_named(shop: Database) -> None:
    section = section_of(shop.dsn)
    init(capture_source(section))
    shop.execute("CREATE TABLE late (id int PRIMARY KEY)")
    with shop.connect() as other:
        with other.transaction():
            other.execute("LOCK TABLE late")
            with pytest.raises(DeadlineError, match=r"public\.late"):
                publish_new(section, time.monotonic())
        assert publish_new(section, soon()) == ()
    assert "late" in published(shop)
    detach(capture_source(section))


def test_capture_and_flush_may_publish_the_same_table_at_once(shop: Database) -> None:
    section = section_of(shop.dsn)
    source = capture_source(section)
    init(source)
    shop.execute("CREATE TABLE late (id int PRIMARY KEY)")
    left: list[list[str]] = []

    def look_of_capture() -> None:
        with capture.connect(source) as connection:
            left.append(publication.follow(connection, source))

    with shop.connect() as other:
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        with other.transaction():
            other.execute("ALTER PUBLICATION tuskline_shop ADD TABLE ONLY late")
            thread = threading.Thread(target=look_of_capture)
            thread.start()
            with shop.connect() as watcher:
                while watcher.execute(waiting).fetchone() == (0,) and thread.is_alive():
                    time.sleep(0.05)
        thread.join(60)
    assert left == [[]]
    detach(source)


def test_a_table_that_the_role_may_not_publish_is_named_and_not_waited_for(
    shop: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    role, admin = f"flushing_{shop.name}", "user=postgres"
    section = section_of(shop.server.dsn(shop.name, user=role, password=SECRET))
    monkeypatch.setenv("PGPASSWORD", str(conninfo_to_dict(shop.dsn)["password"]))
    init(capture_source(section), admin)
    shop.execute("CREATE TABLE late (id int PRIMARY KEY)")
    (note,) = publish_new(section, soon())
    assert "public.late could be published" in note
    assert "late" not in published(shop)
    detach(capture_source(section), admin)


def test_a_server_that_does_not_answer_is_left_to_the_flush_itself(shop: Database) -> None:
    dsn = psycopg.conninfo.make_conninfo(shop.dsn, host="127.0.0.1", port=1)
    assert publish_new(section_of(dsn), soon()) == ()
