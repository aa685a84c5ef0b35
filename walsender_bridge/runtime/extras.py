"""Checks optional packages (`pip install 'tuskline[spark]'`) before they are used.

Otherwise a part would end with a traceback, and its supervisor would restart it for ever.
"""

from importlib.util import find_spec

from walsender_bridge.errors import NotSupportedError

#: The modules of each extra's packages.
MODULES = {
    "certs": ("cryptography",),
    "log-server": ("lmdb", "fsspec", "scramp"),
    "monitor": ("prometheus_client", "textual"),
    "spark": ("obstore", "pyspark", "sqlglot"),
}


def need(extra: str) -> None:
    """Raise `NotSupportedError`, with the command that installs the missing packages, unless the extra is installed."""
    missing = [name for name in MODULES[extra] if find_spec(name) is None]
    if missing:
        raise NotSupportedError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed",
            where=f"this machine, for the extra {extra}",
            repair=f"pip install 'tuskline[{extra}]'",
        )
