"""What came of the last comparison of each table that was to be brought level: `<lake>/_tuskline/leveled.json`, replaced whole.

A report for people, and no part of any decision.
"""

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from spark_consumers.lake.store.lake_store import STATE
from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime import json_model

if TYPE_CHECKING:
    from spark_consumers.lake.manifest.chain import Chain

_FILE: Final = f"{STATE}/leveled.json"
_writing = threading.Lock()


@dataclass
class Counts:
    """What one table took. `rows`: of the source, compared; `read`: rows whose digests both sides were asked for."""

    chunks: int = 0
    different_chunks: int = 0
    rows: int = 0
    read: int = 0
    added: int = 0
    removed: int = 0


@dataclass(frozen=True)
class Leveled:
    """One table. `at`: seconds since the Unix epoch; `lsn`: of the source. `copied`: why it was copied instead; empty: it was brought level."""

    at: float
    lsn: int
    seconds: float
    counts: Counts = field(default_factory=Counts)
    copied: str = ""


@dataclass(frozen=True)
class LevelRecord:
    """The tables, by `stream.schema.table`."""

    tables: Mapping[str, Leveled] = field(default_factory=dict)


def read_leveled(chain: "Chain") -> Mapping[str, Leveled]:
    """The last result of each table; a damaged record counts as none."""
    with contextlib.suppress(OSError, TusklineError, ValueError):
        return json_model.decode(LevelRecord, chain.store.read(_FILE)).tables
    return {}


def record_leveled(chain: "Chain", name: str, found: Leveled) -> None:
    """Record a table's result, if the disk takes it. Safe to call from several threads."""
    with _writing, contextlib.suppress(OSError, TusklineError):
        record = LevelRecord({**read_leveled(chain), name: found})
        chain.store.replace(_FILE, json_model.encode(record), durable=False)
