"""What a program that uses Tuskline imports.

    from tuskline import read, session

    spark = session("me", lake="/srv/lake")
    read(spark, "/srv/lake")["public.orders"].show()

Importing this package imports neither pyspark nor pyarrow nor psycopg: a name loads what it needs when it is first
used. A name that needs an extra raises `NotSupportedError` with the command that installs it. The errors of all of
them are in `tuskline.errors`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tuskline import errors

if TYPE_CHECKING:
    from spark_consumers import ExportedSnapshot, Lakehouse, Snapshot, Source, read
    from spark_consumers.lake.flush import flush, sync
    from spark_consumers.lake.store.lake_store import StoreOptions
    from spark_consumers.spark.session import catalog_settings, session, settings
    from walsender_bridge.change_log.client import LogClient, ReplicaClient
    from walsender_bridge.change_log.stream_reader import StreamReader

    __version__: str

__all__ = [
    "ExportedSnapshot",
    "Lakehouse",
    "LogClient",
    "ReplicaClient",
    "Snapshot",
    "Source",
    "StoreOptions",
    "StreamReader",
    "__version__",
    "catalog_settings",
    "errors",
    "flush",
    "read",
    "session",
    "settings",
    "sync",
]

_FLUSH = "spark_consumers.lake.flush"
_CLIENT = "walsender_bridge.change_log.client"
_SESSION = "spark_consumers.spark.session"
#: The module of each name that is loaded when it is first used.
_MODULES = {
    "ExportedSnapshot": "spark_consumers",
    "Lakehouse": "spark_consumers",
    "LogClient": _CLIENT,
    "ReplicaClient": _CLIENT,
    "Snapshot": "spark_consumers",
    "Source": "spark_consumers",
    "StoreOptions": "spark_consumers.lake.store.lake_store",
    "StreamReader": "walsender_bridge.change_log.stream_reader",
    "catalog_settings": _SESSION,
    "flush": _FLUSH,
    "read": "spark_consumers",
    "session": _SESSION,
    "settings": _SESSION,
    "sync": _FLUSH,
}
#: The extra of each name that an installation without extras cannot load.
_EXTRAS = {
    "Lakehouse": "spark",
    "catalog_settings": "spark",
    "session": "spark",
    "settings": "spark",
}

if not TYPE_CHECKING:  # with it, a type checker would take every name for one of this package

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            value: Any = _version()
        elif name in _MODULES:
            if name in _EXTRAS:
                from walsender_bridge.runtime import extras

                extras.need(_EXTRAS[name])
            value = getattr(import_module(_MODULES[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Python asks here only for what the module does not have.
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import version

    return version("tuskline")
