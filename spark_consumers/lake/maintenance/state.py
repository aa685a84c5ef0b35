"""What a maintainer remembers, and what it shows, in records of the lake.

`<lake>/_tuskline/maintenance/<table>` says of which snapshot nothing was left to do, so a table that has not changed is not
looked at again, by another maintainer either. `<lake>/_tuskline/maintenance.json` is for those who look from outside. Neither is
a promise: one that is lost costs a look.
"""

import contextlib
import hashlib
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spark_consumers.lake.store.lake_store import STATE
from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime import json_model

if TYPE_CHECKING:
    from spark_consumers.lake.manifest.chain import Chain

_TABLES = f"{STATE}/maintenance"
_SUMMARY = f"{STATE}/maintenance.json"
#: Refused offers that the summary names.
_REFUSED = 10


@dataclass(frozen=True, slots=True)
class Done:
    """Of one table: the folder and the snapshot of which nothing was left to do, perhaps not even once it is settled."""

    table: str
    path: str
    snapshot: int
    is_settled: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """An offer that the writer refused. `at`: seconds since the Unix epoch."""

    table: str
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What a maintainer has done since it began, and how it is. Times are in seconds since the Unix epoch.

    `at`: when it last showed it; `looked_at`: when it last went through the tables; `rewritten_at`: when an offer was last
    accepted. `files_before` became `files_after` in `accepted` offers, of `rewritten_bytes` that were read. `waiting`: offers that the
    writer has not decided on; `due_bytes`: what is left to rewrite. `refusals`: the newest ones. `error`: why it does not get on.
    """

    at: float = 0.0
    maintainer: str = ""
    began_at: float = 0.0
    looked_at: float = 0.0
    rewritten_at: float = 0.0
    tables: int = 0
    accepted: int = 0
    refused: int = 0
    waiting: int = 0
    files_before: int = 0
    files_after: int = 0
    rewritten_bytes: int = 0
    due_bytes: int = 0
    is_standing_by: bool = False
    refusals: tuple[Refusal, ...] = ()
    error: str = ""

    def with_refusal(self, table: str, reason: str) -> tuple[Refusal, ...]:
        """The newest refusals, this one among them."""
        return (Refusal(table, reason, time.time()), *self.refusals)[:_REFUSED]


@dataclass
class Settling:
    """Since when one maintainer has seen each table unchanged: a table is settled after a while.

    It begins anew with each maintainer, so a table is settled later than it might be, and never earlier.
    """

    #: In seconds.
    after: float
    clock: Callable[[], float] = time.monotonic
    #: Whether every table counts as settled.
    is_over: bool = False
    _since: dict[str, tuple[str, int, float]] = field(default_factory=dict)

    def is_settled(self, name: str, path: str, snapshot: int) -> bool:
        """Whether the table has had this snapshot for long enough."""
        known = self._since.get(name)
        if known is None or known[:2] != (path, snapshot):
            known = self._since[name] = (path, snapshot, self.clock())
        return self.is_over or self.clock() - known[2] >= self.after

    def keep(self, names: Collection[str]) -> None:
        """Forget all tables but these."""
        for name in self._since.keys() - set(names):
            del self._since[name]


@dataclass
class Remembered:
    """The records of the tables, as one maintainer knows them."""

    chain: "Chain"
    _done: dict[str, Done] = field(default_factory=dict)
    _is_read: bool = False

    def is_done(self, name: str, path: str, snapshot: int, *, is_settled: bool) -> bool:
        """Whether nothing was left to do of this snapshot of the table, also if it is settled now."""
        if not self._is_read:
            self._read()
        done = self._done.get(name)
        return done is not None and (
            done == Done(name, path, snapshot, is_settled=True)
            or (not is_settled and done == Done(name, path, snapshot))
        )

    def done(self, name: str, path: str, snapshot: int, *, is_settled: bool) -> None:
        """Remember that nothing is left to do."""
        self._done[name] = Done(name, path, snapshot, is_settled)
        with contextlib.suppress(OSError, TusklineError):
            content = json_model.encode(self._done[name])
            self.chain.store.replace(_record(name), content, durable=False)

    def keep(self, names: Mapping[str, object]) -> None:
        """Forget all tables but these."""
        for name in self._done.keys() - names.keys():
            del self._done[name]
            with contextlib.suppress(OSError, TusklineError):
                self.chain.store.remove(_record(name))

    def _read(self) -> None:
        self._is_read = True
        store = self.chain.store
        with contextlib.suppress(OSError, TusklineError):
            store.prepare(_TABLES)
            for name in store.names(_TABLES):
                with contextlib.suppress(OSError, TusklineError, ValueError):
                    found = json_model.decode(Done, store.read(f"{_TABLES}/{name}"))
                    self._done[found.table] = found


def _record(name: str) -> str:
    # Any role that may create tables chooses their names.
    return f"{_TABLES}/{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"


def write_summary(chain: "Chain", summary: Summary) -> None:
    """Replace the summary, if the store takes it."""
    with contextlib.suppress(OSError, TusklineError):
        chain.store.replace(_SUMMARY, json_model.encode(summary), durable=False)


def read_summary(chain: "Chain") -> Summary | None:
    """The summary that was written last; None if there is none, or it is damaged."""
    with contextlib.suppress(OSError, TusklineError, ValueError):
        return json_model.decode(Summary, chain.store.read(_SUMMARY))
    return None
