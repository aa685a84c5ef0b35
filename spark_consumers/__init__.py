"""Everything in Tuskline that runs on Spark: reading a lake's epochs, and writing them.

    import spark_consumers
    snapshot = spark_consumers.read(spark, "lake")
    snapshot["public.orders"].show()

Importing this needs no pyspark; the names below load what they need when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_consumers.lake.reader import Snapshot, read
    from spark_consumers.lake.tables.sources import Source
    from spark_consumers.lake.writer.pipeline import Lakehouse
    from spark_consumers.snapshot.exported import ExportedSnapshot

__all__ = ["ExportedSnapshot", "Lakehouse", "Snapshot", "Source", "read"]

_HOMES = {
    "ExportedSnapshot": "snapshot.exported",
    "Lakehouse": "lake.writer.pipeline",
    "Snapshot": "lake.reader",
    "Source": "lake.tables.sources",
    "read": "lake.reader",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
