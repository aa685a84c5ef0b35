"""A lakehouse over one database with capture and log, driven a round at a time."""

import threading
from contextlib import contextmanager

import pytest

from spark_consumers import Lakehouse, Source, read
from spark_consumers.lake.maintenance.maintainer import Limits, Maintainer
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.store.lake_store import FROM_ENVIRONMENT
from tests.support.capture_stack import PUBLICATION, STREAM, CaptureProcess, ChangeLog
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.errors import DeadlineError
from walsender_bridge.runtime import fail_point
from walsender_bridge.runtime.sql import load

TABLES = (
    "CREATE TABLE docs (id int PRIMARY KEY, title text, body text, n numeric(12,3), f float8)",
    "ALTER TABLE docs ALTER body SET STORAGE EXTERNAL",
    "INSERT INTO docs SELECT g, 't' || g, repeat(chr(96 + g), 4000), g, 0 FROM generate_series(1, 9) g",
    "CREATE TABLE pairs (a int, b varchar(9), at timestamptz, tags int[], PRIMARY KEY (b, a))",
    "INSERT INTO pairs VALUES (1, 'x', '2024-02-29 12:00+02', '{1,NULL}'), (2, 'y', NULL, NULL)",
    "CREATE TABLE bag (a int, f float8, t text, l text[])",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    "INSERT INTO bag SELECT 1, 0, 'three', '{a,NULL}' FROM generate_series(1, 3)",
    "INSERT INTO bag VALUES (1, '-0', 'three', '{a,NULL}'), (NULL, 'NaN', NULL, NULL)",
)
PUBLISHED = ("public.docs", "public.pairs", "public.bag")


def unreadable(ask):
    """What a flush says that fails for want of tables: `ask(seconds)`, which gets more time where no epoch came in it."""
    for seconds in (2.0, 8.0, 32.0):
        with pytest.raises(DeadlineError) as found:
            ask(seconds)
        if "is published, without" in found.value.what:
            break
    return found.value.what


@contextmanager
def maintaining(pipeline, **limits):
    """A maintainer of the pipeline's lake in a thread of its own."""
    made = Maintainer(pipeline.lake, Limits(interval=0.1, **limits))
    stop = threading.Event()
    thread = threading.Thread(target=made.run, args=(stop,))
    thread.start()
    try:
        yield made
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


def dies(monkeypatch, pipeline, point, meanwhile=()):
    """The round of a flush ends at a fail point, and the writer with it: the caller makes the next one. `meanwhile`: statements that run there."""

    def die(name):
        if name == point:
            pipeline.database.execute(*meanwhile)
            raise RuntimeError("dies")

    with monkeypatch.context() as patch:
        patch.setattr(fail_point, "hit", die)
        with pytest.raises(RuntimeError, match="dies"):
            pipeline.flush()
    pipeline.house.close()


class Pipeline:
    """A lakehouse over one database's `tables`, driven a round at a time."""

    def __init__(
        self, spark, folder, database, tables=PUBLISHED, lake=None, store=FROM_ENVIRONMENT
    ):
        self.spark, self.database, self.folder = spark, database, folder
        self.lake = lake or folder / "lake"
        self.store = store
        self.log = ChangeLog(folder)
        self.capture = CaptureProcess(folder, self.log, database.dsn, *tables)
        self.made = []

    def __enter__(self):
        self.log.__enter__()
        self.capture.__enter__()
        wait_for(self.capture.streams, 60, "capture streams")
        self.house = self.lakehouse()
        return self

    def __exit__(self, *error):
        for house in self.made:
            house.close()
        self.capture.__exit__(*error)
        self.log.__exit__(*error)

    def lakehouse(self, sources=None, **options):
        sources = sources or [Source(STREAM, self.database.dsn, PUBLICATION)]
        house = Lakehouse(
            self.spark,
            self.lake,
            self.log.address,
            sources,
            epoch_interval=3600,
            store=self.store,
            **options,
        )
        self.made.append(house)
        return house

    def all_or_nothing(self):
        """From here on epochs wait for every table."""
        self.house.close()
        self.house = self.lakehouse(failing_table="hold")
        self.house.run_once()

    def head(self):
        """The newest link."""
        found = open_chain(self.lake, self.store).head()
        assert found is not None
        return found

    def flush(self, house=None):
        """Publish everything that was committed before; the snapshot that holds it."""
        house = house or self.house
        version = self.barrier()
        while (head := open_chain(self.lake, self.store).head()) is None or head.epoch < version:
            house.run_once()
        return read(self.spark, self.lake, store=self.store)

    def barrier(self):
        """The version by which the log has everything that was committed before."""
        with self.database.connect() as connection:
            position = connection.execute(load("flush/position")).fetchone()[0]
            connection.execute(load("flush/write"))
        with LogClient(self.log.address) as log:
            return log.barrier({STREAM: position}, timeout=30)

    def wait_for_tables(self, *names, house=None):
        """Run rounds until these tables are shown."""

        def shown():
            (house or self.house).run_once(force=True)
            return {f"{STREAM}.public.{name}" for name in names} <= set(self.head().readable)

        # Each is a copy of its own.
        wait_for(shown, 60 + 5 * len(names), f"{len(names)} tables in the lake: {names}")
