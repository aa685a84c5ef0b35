"""`tuskline lake run`: a Spark driver that publishes epochs, the only one of this machine for its lake.

It takes its locks before it starts Spark, which takes seconds. A driver on another machine stands by (docs/decisions/lake-writer.md).
"""

import os
import signal
import sys
import threading
from pathlib import Path

from spark_consumers.lake import folder
from spark_consumers.lake.manifest.chain import local_root
from walsender_bridge.cli.copy_bars import CopyBars
from walsender_bridge.cli.options import lake_section
from walsender_bridge.cli.parts import alone
from walsender_bridge.config import Config
from walsender_bridge.errors import TusklineError
from walsender_bridge.observability import lake_status


def run(settings: Config) -> None:
    """Publish epochs until SIGTERM or SIGINT. Raises `RunningError` while another process of this machine does."""
    lake = lake_section(settings)
    with alone("lake", [settings.run_dir]):
        try:
            folder.check(lake.uri)
        except TusklineError as error:
            lake_status.write(settings.run_dir, error)
            raise
        # Where the lake's file system has no locks, a second driver stands by.
        with alone("lake", [place(lake.uri)], regardless=True):
            _drive(settings)


def place(uri: str) -> Path:
    """The folder in which this machine's driver of a lake holds its lock."""
    return local_root(uri) / "_tuskline" / "hosts" / os.uname().nodename.replace("/", "_")


def _drive(settings: Config) -> None:
    from spark_consumers.lake.writer.pipeline import Lakehouse, Source
    from spark_consumers.spark.scratch import scratch
    from spark_consumers.spark.scratch import settings as scratch_settings
    from spark_consumers.spark.session import session, submitted

    lake, stop = lake_section(settings), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    with scratch(settings.scratch_dir) as own_folder:
        # Under spark-submit the JVM already runs, with the folders of its own settings.
        own = {} if submitted() else scratch_settings(own_folder, lake.spark_master)
        spark = session("tuskline-lake", master=lake.spark_master, lake=lake.uri, conf=own)
        try:
            with CopyBars(shown=sys.stderr.isatty()) as bars:
                Lakehouse(
                    spark,
                    lake.uri,
                    settings.log_address,
                    [Source(s.name, s.dsn, s.publication_name) for s in settings.source],
                    epoch_interval=lake.epoch_interval,
                    retention_seconds=lake.retention,
                    format=lake.format,
                    failing_table=lake.failing_table,
                    copy_rate=lake.copy_rate,
                    progress=bars.show,
                    on_unrepresentable_value=lake.on_unrepresentable_value,
                    failing=lambda error: lake_status.write(settings.run_dir, error),
                ).run(stop)
        finally:
            spark.stop()
