"""Packages that only some machines need (`pip install 'tuskline[spark]'`), checked before they are used.

Otherwise a part would end with a traceback, and its supervisor would start it again for ever.
"""

from importlib.util import find_spec

from walsender_bridge.errors import NotSupportedError

#: By the name of the extra: the modules of its packages.
MODULES = {
    "log-server": ("lmdb", "fsspec", "scramp"),
    "monitor": ("prometheus_client", "textual"),
    "spark": ("pyspark",),
}


def need(extra: str) -> None:
    """Raises `NotSupportedError` with the command that installs what is missing."""
    missing = [name for name in MODULES[extra] if find_spec(name) is None]
    if missing:
        raise NotSupportedError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed",
            where=f"this machine, for the extra {extra}",
            repair=f"pip install 'tuskline[{extra}]'",
        )
