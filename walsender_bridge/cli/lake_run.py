"""`tuskline lake run`: a Spark driver that publishes epochs, the only one of this machine for its lake.

It takes its locks before it starts Spark, which takes seconds. A driver on another machine stands by (docs/decisions/lake-writer.md).
"""

import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Final

from spark_consumers.lake import folder
from spark_consumers.lake.store.open_store import local_root
from spark_consumers.lake.store.place import is_object
from walsender_bridge.cli.copy_bars import CopyBars
from walsender_bridge.cli.lake_session import lake_session
from walsender_bridge.cli.options import lake_section
from walsender_bridge.cli.parts import alone
from walsender_bridge.cli.view import view_definitions
from walsender_bridge.config import Config
from walsender_bridge.errors import DiskFullError, LakeError, TusklineError
from walsender_bridge.observability import lake_status
from walsender_bridge.observability.lake_chain import rest_catalog, store_options
from walsender_bridge.runtime import cache

#: Bytes that have to be free where Spark has its scratch folder: its copy of Iceberg's jar, and some more.
SCRATCH_BYTES: Final = 128 << 20


def run(settings: Config) -> None:
    """Publish epochs until SIGTERM or SIGINT. Raises `RunningError` while another process of this machine does."""
    lake = lake_section(settings)
    with alone("lake", [settings.run_dir]):
        with _on_record(settings):
            folder.check(lake.uri, store_options(lake))
            check_scratch(settings.scratch_dir)
        # Where the lake's file system has no locks, a second driver stands by.
        with alone("lake", [place(lake.uri)], regardless=True), _on_record(settings):
            _drive(settings)


@contextmanager
def _on_record(settings: Config) -> Iterator[None]:
    """Write an error of the block down for `status`; one of Spark's that means a full disk becomes that."""
    try:
        yield
    except TusklineError as error:
        lake_status.write(settings.run_dir, error)
        raise
    except Exception as error:
        found = folder.why(error, lake_section(settings).uri)
        lake_status.write(settings.run_dir, found)
        if isinstance(found, LakeError):
            raise found from None
        raise


def check_scratch(scratch_dir: Path) -> None:
    """Raise `DiskFullError` where Spark would not find room for the jars and files that it begins with."""
    place = next(each for each in (scratch_dir, *scratch_dir.parents) if each.is_dir())
    free = shutil.disk_usage(place).free
    if free < SCRATCH_BYTES:
        raise DiskFullError(
            f"the disk is full: {free >> 20} MB are free, and Spark begins with {SCRATCH_BYTES >> 20} MB of files",
            where=str(scratch_dir),
            repair="free disk space there, or set data_dir ([machine], or else [log]) to a folder on another disk",
        )


def place(uri: str) -> Path:
    """The folder in which this machine's driver of a lake holds its lock: in the lake, or for one in a bucket on this machine."""
    if is_object(uri):
        return cache.folder() / "lakes" / sha256(uri.rstrip("/").encode()).hexdigest()[:20]
    return local_root(uri) / "_tuskline" / "hosts" / os.uname().nodename.replace("/", "_")


def _drive(settings: Config) -> None:
    from spark_consumers.lake.flush_service import FlushService
    from spark_consumers.lake.mask_key import mask_key
    from spark_consumers.lake.writer.pipeline import Lakehouse, Source

    lake, stop = lake_section(settings), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    with (
        lake_session(settings, "tuskline-lake") as spark,
        CopyBars(shown=sys.stderr.isatty()) as bars,
    ):
        sources = [Source(s.name, s.dsn, s.publication_name) for s in settings.source]
        house = Lakehouse(
            spark,
            lake.uri,
            settings.log_address,
            sources,
            epoch_interval=lake.epoch_interval,
            retention_seconds=lake.retention,
            format=lake.format,
            store=store_options(lake),
            rest=rest_catalog(lake),
            delta=lake.delta,
            failing_table=lake.failing_table,
            copy_rate=lake.copy_rate,
            copy_chunk_bytes=lake.copy_chunk_bytes,
            progress=bars.show,
            on_unrepresentable_value=lake.on_unrepresentable_value,
            deletes=lake.deletes,
            layouts=[section.rule for section in lake.tables],
            views=view_definitions(lake),
            mask_key=mask_key(lake.mask_key_file),
            failing=lambda error: lake_status.write(settings.run_dir, error),
        )
        with FlushService(
            lake.uri,
            settings.log_address,
            sources,
            lambda: house.is_writer,
            store_options(lake),
        ):
            house.run(stop)
