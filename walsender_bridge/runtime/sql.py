"""SQL texts that run inside PostgreSQL, by name. They are files in `sql/`, in a folder for each part that sends them."""

from functools import cache
from pathlib import Path

from walsender_bridge.errors import UsageError

_PACKAGE = Path(__file__).resolve().parents[1]


def folder() -> Path:
    """The folder of the texts: in the package in an installed wheel, `sql/` in a source tree."""
    shipped = _PACKAGE / "sql_texts"
    return shipped if shipped.is_dir() else _PACKAGE.parent / "sql"


@cache
def load(name: str) -> str:
    """The text of `sql/<name>.sql`, for instance of `publication/create`; `UsageError` if there is none."""
    path = folder() / f"{name}.sql"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"there is no SQL text named {name!r}", where=str(path)) from None
