"""The log is restored or replaced, or a source reattached: no table is live with rows of another history.

After a reattachment the source has changes that the log never gets. The lake's own decisions (`history`, `rolled_back`,
`adopt`, `plan`, `states`, `requests`) over a source and a log in memory. The log
has two streams; a commit of it sets one row of one table. After each step: what a live table shows is what the log's
history has at the epoch. With a part of the rule taken out, some run breaks that.
"""

import copy
import random
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from spark_consumers.lake.epoch import rolled_back
from spark_consumers.lake.epoch.plan import choose
from spark_consumers.lake.manifest.chain import Manifest, StreamPosition, TableVersion
from spark_consumers.lake.manifest.table_version import LIVE, PAUSED
from spark_consumers.lake.policy import Policy
from spark_consumers.lake.tables import states
from spark_consumers.lake.tables.states import stream_of
from spark_consumers.lake.writer import adopt, requests
from spark_consumers.sources import history
from spark_consumers.sources.history import Around
from walsender_bridge.change_log.client import CutPoint, LogStatus, StreamCut

TABLES = ("a.public.t", "a.public.u", "b.public.t")
SEEDS, STEPS = 40, 120
#: From this seed on are some in which a copy waits while the log is restored.
RARE = 890


class ViolationError(Exception):
    """A live table does not show what the log has."""


@dataclass(frozen=True)
class Commit:
    """A commit of the log: where it ends, and what it changed (table, key, value).

    `is_restart`: it begins another history, and the change is none of the log: it came while there was no slot.
    """

    point: CutPoint
    change: tuple[str, int, int]
    is_restart: bool = False


@dataclass
class Log:
    """A log and what it was written from; `restore` brings back all of it. Nothing is trimmed.

    `log_id`: an earlier log has another one. `base`: the source's rows when this log was made, by table.
    """

    log_id: str = "0"
    base: dict[str, dict[int, int]] = field(default_factory=dict)
    version: int = 0
    commits: dict[str, list[Commit]] = field(default_factory=lambda: {"a": [], "b": []})

    def commit(self, table: str, key: int, value: int, *, now: int) -> None:
        """One transaction; `now` is a commit time that no other history has."""
        self.version += 1
        found = self.commits[stream_of(table)]
        end = (found[-1].point.end_offset if found else 1) + 1
        # LSNs of the two histories meet again and again.
        lsn = 10 * (end - self.history_start(stream_of(table)) + 1)
        found.append(Commit(CutPoint(self.version, end, end, lsn, now), (table, key, value)))

    def reattach(self, table: str, key: int, value: int) -> None:
        """Another history, after a change that the log does not get."""
        self.version += 1
        found = self.commits[stream_of(table)]
        end = (found[-1].point.end_offset if found else 1) + 1
        point = CutPoint(self.version, end, end, 0, 0)
        found.append(Commit(point, (table, key, value), is_restart=True))

    def history_start(self, stream: str) -> int:
        ends = (c.point.end_offset for c in self.commits[stream] if c.is_restart)
        return max(ends, default=1)

    def status(self) -> LogStatus:
        cuts = {}
        for stream, found in self.commits.items():
            at = found[-1].point if found else CutPoint(0, 1, 0, 0, 0)
            cuts[stream] = StreamCut(
                *(stream, ("",), at.end_offset, 0, at.last_end_lsn, at.last_commit_time, 1, 1, 0),
                self.history_start(stream),
            )
        return LogStatus(self.log_id, self.version, 0, cuts)

    def behind(self, stream: str, offset: int) -> list[CutPoint]:
        return [c.point for c in self.commits[stream] if c.point.end_offset > offset]

    def around(self, stream: str, offset: int) -> Around | None:
        """As `history.around`."""
        behind = self.behind(stream, offset)
        if not behind:
            return None
        points = [commit.point for commit in self.commits[stream]]
        place = points.index(behind[0])
        return Around(points[place - 1] if place else None, behind[0])

    def rows(self, table: str, until: int) -> dict[int, int]:
        """The table as of this offset of its stream, in the source."""
        rows = dict(self.base.get(table, {}))
        for commit in self.commits[stream_of(table)]:
            name, key, value = commit.change
            if name == table and commit.point.end_offset <= until:
                rows[key] = value
        return rows


class Lake:
    """The lake's loop, a look at a time, without files: rows by path."""

    def __init__(self, seed: int, *, hold: bool, replaces: bool = False) -> None:
        self.random = random.Random(seed)
        self.replaces, self.adopted = replaces, 0
        self.log, self.hold = Log(), hold
        self.now = 0
        self.snapshots: list[Log] = []
        self.paths = iter(range(10**6))
        self.rows: dict[str, dict[int, int]] = {}
        self.asked: list[requests.Request] = []
        self.apart: dict[str, str] = {}
        status = self.log.status()
        streams = {s: StreamPosition(0, 0, 0, 1) for s in status.streams}
        self.head = Manifest("lake", 1, 0, 0, 1, 0.0, streams=streams, log_id=self.log.log_id)
        self.to_adopt: list[requests.Request] = []

    # -- what happens around it ---------------------------------------------------------------------

    def commit(self) -> None:
        self.now += 1
        table = self.random.choice(TABLES)
        self.log.commit(table, self.random.randint(1, 5), self.now, now=self.now)

    def reattach(self) -> None:
        self.now += 1
        self.log.reattach(self.random.choice(TABLES), self.random.randint(1, 5), self.now)

    def snapshot(self) -> None:
        self.snapshots.append(copy.deepcopy(self.log))

    def restore(self) -> None:
        if self.snapshots:
            self.log = copy.deepcopy(self.random.choice(self.snapshots))

    def replace(self) -> None:
        """The log's data is removed: another log answers, and the source has gone on."""
        base = {}
        for table in TABLES:
            self.now += 1
            base[table] = {**self.log.rows(table, 10**9), self.random.randint(1, 5): self.now}
        self.log = Log(str(next(self.paths)), base)

    def ask_adoption(self) -> None:
        self.to_adopt.append(
            requests.Request(str(next(self.paths)), requests.ADOPT, (), log_id=self.log.log_id)
        )

    def ask(self) -> None:
        kind = self.random.choice(
            [requests.RESYNC, requests.RESYNC, requests.RESUME, requests.PAUSE]
        )
        names = self.random.sample(TABLES, self.random.randint(1, 3))
        self.asked.append(requests.Request(str(next(self.paths)), kind, tuple(names)))

    # -- a look, as `Lakehouse.run_once` --------------------------------------------------------------

    def look(self) -> None:
        if not self._of_this_log():
            return
        status = self._same_history(self.log.status())
        self._tables(status)
        if not self.hold:
            self.head = Policy("go_on").released(self.head, rolled_back.REASON)
        if self.hold and any(rolled_back.unasked(self.head, s) for s in self.apart):
            return
        if status.version > self.head.epoch and self._awaited(status):
            self._epoch(status)

    def _of_this_log(self) -> bool:
        """As `adopt.wanted`, and the takeover that follows; False where the driver ends."""
        log_id = self.log.log_id
        if self.head.log_id != log_id:
            if not any(one.log_id == log_id for one in self.to_adopt):
                return False
            self.log.version = max(self.log.version, self.head.epoch)
            status, asked = self.log.status(), self.to_adopt
            self.head = adopt.adopted(self.head, status, ("a", "b"), asked, holds=self.hold)
            self.adopted += 1
        self.to_adopt = []
        return True

    def _same_history(self, status: LogStatus) -> LogStatus:
        self.apart = {}
        for stream, position in self.head.streams.items():
            found = self.log.around(stream, position.offset)
            if why := rolled_back.why_apart(self.head, status, stream, found):
                self.apart[stream] = why
        head = rolled_back.hold(self.head, self.apart, holds=self.hold)
        head = replace(
            head, copies={n: c for n, c in head.copies.items() if self._kept(n, c, status)}
        )
        if rolled_back.given_up(head, self.apart) and status.version < head.epoch:
            self.log.version = head.epoch
        self.head = rolled_back.begin_again(head, self.apart, status)
        return rolled_back.without(status, self.apart)

    def _kept(self, name: str, made: TableVersion, status: LogStatus) -> bool:
        """As `log_view.without_lost`."""
        stream, marked = stream_of(name), rolled_back.mark_of_copy(made)
        if marked is None:
            return True
        found = self.log.around(stream, marked[1].offset)
        return not history.differs(*marked, status, stream, found)

    def _tables(self, status: LogStatus) -> None:
        head = self.head
        for request in self.asked:
            head = requests.carry_out(head, request, TABLES, {}, 0.0, self.apart)
        self.asked = []
        self.head = rolled_back.hold(head, self.apart, holds=self.hold)
        for name in sorted(states.wanted_copies(self.head, TABLES)):
            stream = stream_of(name)
            if stream not in status.streams or self.random.random() < 0.5:
                continue
            # The copy is of the source as it is by then: the log itself, which has everything at once.
            cut, path = status.streams[stream], str(next(self.paths))
            self.rows[path] = self.log.rows(name, cut.end_offset)
            made = TableVersion(
                *(path, "iceberg", 1, "", ("id",), (), cut.last_end_lsn, cut.end_offset, 0, 1),
                state="copied",
                timeline=1,
            )
            made = rolled_back.marked(made, status, stream)
            self.head = replace(self.head, copies={**self.head.copies, name: made})

    def _awaited(self, status: LogStatus) -> bool:
        for name in states.held(self.head):
            made = self.head.copies.get(name)
            if made is None or stream_of(name) not in status.streams:
                return False
        return True

    def _epoch(self, status: LogStatus) -> None:
        commits = {s: self.log.behind(s, self.head.streams[s].offset) for s in status.streams}
        plan = choose(self.head, status.version, status.streams, commits)
        tables = dict(plan.tables)
        for name, table in plan.tables.items():
            if table.state != LIVE:
                continue
            stream = stream_of(name)
            start = table.offset if name in plan.fresh else self.head.streams[stream].offset
            rows = dict(self.rows[table.path])
            for commit in self.log.commits[stream]:
                at, (changed, key, value) = commit.point.end_offset, commit.change
                followed = start < at <= plan.streams[stream].offset and not commit.is_restart
                if changed == name and followed:
                    rows[key] = value
            path = str(next(self.paths))
            self.rows[path] = rows
            tables[name] = replace(table, path=path)
        self.head = self.head.next(
            0.0, epoch=plan.version, streams=plan.streams, tables=tables, copies=plan.copies
        )
        self._check()

    def _check(self) -> None:
        """Only published epochs are looked at: one that was published before the restore is of its own history."""
        for name, table in self.head.tables.items():
            if table.state != LIVE:
                continue
            position = self.head.streams[stream_of(name)]
            expected = self.log.rows(name, position.offset)
            if self.rows[table.path] != expected:
                raise ViolationError(
                    f"{name} at {self.head.epoch}: {self.rows[table.path]}, {expected}"
                )

    # -- a run --------------------------------------------------------------------------------------

    def run(self) -> int:
        """Steps by chance; how many epochs were published. Then it can be brought back, as the errors say."""
        steps = [*[self.commit] * 8, *[self.look] * 8, self.snapshot, self.restore, self.ask]
        steps += [self.reattach]
        if self.replaces:
            steps += [self.replace, self.ask_adoption, self.ask_adoption]
        epochs = 0
        for _ in range(STEPS):
            before = self.head.epoch
            self.random.choice(steps)()
            epochs += self.head.epoch > before
        self._brought_back()
        return epochs

    def _brought_back(self) -> None:
        everything = requests.Request("last", requests.RESYNC, TABLES)
        self.ask_adoption()
        self.look()
        self.asked.append(everything)
        for _ in range(60):
            self.commit()
            self.look()
            if len(self.head.tables) == 3 and all(
                t.state == LIVE and not t.resync for t in self.head.tables.values()
            ):
                return
        raise AssertionError(f"not live again: {self.head.tables}")


def _only_the_identity(*_: object) -> None:
    """Takes a log of the same identity for the same history."""


def _only_positions(version, mark, status, stream, found):
    """Takes an offset and a version for a history."""
    end = status.streams[stream].end_offset
    return "behind" if status.version < version or mark.offset > end else None


def _stays(head, apart, status):
    """Goes on from the old history's cut."""
    del apart, status
    return head


def _begins_where_it_may(head, apart, status):
    """Takes the log's cut, and lets tables that stopped go on from their offsets."""
    made = _begin_again(head, apart, status)
    return replace(made, tables=head.tables)


_adopted = adopt.adopted
#: A log is taken on without a part of this: the head before, and what it should become. That the cut is the old log's would
#: be found as if the log had been rolled back.
_PARTS = {
    "tables that are copied again": lambda before, after: replace(after, tables=before.tables),
    "paused ones among them": lambda before, after: replace(
        after,
        tables={
            **after.tables,
            **{name: t for name, t in before.tables.items() if t.state == PAUSED},
        },
    ),
    "copies that are dropped": lambda before, after: replace(after, copies=before.copies),
}


def _without(part):
    def adopted(link, status, sources, asked, *, holds):
        return part(link, _adopted(link, status, sources, asked, holds=holds))

    return adopted


ADOPTIONS = {name: _without(part) for name, part in _PARTS.items()}
_begin_again = rolled_back.begin_again
MUTANTS: dict[str, tuple[ModuleType | None, str, Any]] = {
    "the log's identity is enough": (rolled_back, "differs", _only_the_identity),
    "offset and version are enough": (rolled_back, "differs", _only_positions),
    "tables are not stopped": (rolled_back, "hold", lambda head, _, holds: head),
    "the cut stays the old history's": (rolled_back, "begin_again", _stays),
    "tables go on from offsets of the old history": (
        rolled_back,
        "begin_again",
        _begins_where_it_may,
    ),
}


def runs(seed: int, holds: tuple[bool, ...], *, replaces: bool = False) -> int:
    """Epochs of as many runs as there are seeds."""
    epochs, adopted = 0, 0
    for number in range(seed, seed + SEEDS):
        print(f"seed {number}")
        for hold in holds:
            lake = Lake(number, hold=hold, replaces=replaces)
            epochs += lake.run()
            adopted += lake.adopted
    assert not replaces or adopted > SEEDS
    return epochs


def test_the_simulation_finds_a_stream_that_goes_on_after_a_reattachment(seed: int) -> None:
    blind = [
        mock.patch.object(place, "was_reattached", return_value=False)
        for place in (history, rolled_back)
    ]
    with blind[0], blind[1], pytest.raises(ViolationError):
        runs(seed, (True, False))


def test_the_simulation_finds_copies_that_are_not_looked_at() -> None:
    """One run in some hundred: a copy that waits is ahead of the lake's cut, and the log is restored in between."""
    blind = mock.patch.object(rolled_back, "mark_of_copy", return_value=None)
    with blind, pytest.raises(ViolationError):
        runs(RARE, (True,))
    runs(RARE, (True,))


@pytest.mark.parametrize("hold", [True, False], ids=["hold", "go on"])
def test_no_table_is_live_with_rows_of_another_history(hold: bool, seed: int) -> None:
    assert runs(seed, (hold,)) > 10 * SEEDS


@pytest.mark.parametrize("hold", [True, False], ids=["hold", "go on"])
def test_no_table_is_live_with_rows_of_another_log(hold: bool, seed: int) -> None:
    # Nothing is published before somebody asks for the log that answers.
    assert runs(seed, (hold,), replaces=True) > 5 * SEEDS


def many_runs(seed: int) -> None:
    """As few pause a table, replace the log and resume the table before they do anything else with it."""
    for later in range(0, 10 * SEEDS, SEEDS):
        runs(seed + later, (True, False), replaces=True)


@pytest.mark.parametrize("name", ADOPTIONS)
def test_the_simulation_finds_a_log_that_is_taken_on_without(name: str, seed: int) -> None:
    with (
        mock.patch.object(adopt, "adopted", ADOPTIONS[name]),
        pytest.raises((ViolationError, AssertionError)) as found,
    ):
        many_runs(seed)
    print(found.value)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulation_finds_the_mutant(name: str, seed: int) -> None:
    place, attribute, instead = MUTANTS[name]
    target = f"{__name__}.{attribute}" if place is None else f"{place.__name__}.{attribute}"
    with mock.patch(target, instead), pytest.raises((ViolationError, AssertionError)) as found:
        runs(seed, (True, False))
    print(found.value)
