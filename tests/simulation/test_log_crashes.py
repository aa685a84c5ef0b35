"""Replicas on a real disk and the repository's core, with a crash between any two of their steps.

A writer per stream sends numbered transactions as capture does: it goes on behind the log's last end
LSN. Crashes hit between the effects of a transaction of the store, before and after its commit, within
a roll and within a trim; answers get lost; the repository restarts from its records. Whatever happens:
what was acknowledged and whole is there, every transaction is committed once and in order, versions
grow, and every restart finds a valid replica. Now and then the source is reattached: LSNs begin again, offsets go on. A repository that was put back from a copy issues no version that a
replica knows.
"""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import pgoutput_messages as pg
from tests.support.log_entries import ACCOUNTS, HASHES, SCHEMAS, batches
from walsender_bridge.change_log import entry
from walsender_bridge.change_log.protocol import ReplicaReport
from walsender_bridge.change_log.replica.core import Replica
from walsender_bridge.change_log.replica.disk import Effect, PutDurable, RecoveryOutcome
from walsender_bridge.change_log.replica.host import HostedReplica
from walsender_bridge.change_log.repository.barriers import Barriers
from walsender_bridge.change_log.repository.core import (
    Created,
    Record,
    Repository,
    RepositoryTick,
    StreamCreated,
)
from walsender_bridge.change_log.repository.stream_faults import StreamFaults
from walsender_bridge.change_log.restart import build_restart
from walsender_bridge.errors import InvalidReplicaError, TusklineError
from walsender_bridge.postgres.protocol.lsn import WalPosition

STREAMS = ("a", "b")
FOREVER = 2**62


@dataclass
class LogServer:
    log_server_id: str
    address: str = "here"
    answers: bool = True
    heard: bool = True
    problem: TusklineError | None = None
    refused: dict[str, TusklineError] = field(default_factory=dict)


class Crash(BaseException):
    """The process is gone. Not an Exception: nobody in it can catch it."""


class Simulation:
    def __init__(self, folder: Path, seed: int) -> None:
        self.choose = random.Random(seed)
        self.folder = folder
        self.steps_left: int | None = None
        self.crashes: dict[str, int] = {}
        self.now = 0.0
        self.records: list[Record] = [Created("log")]
        self.repository = Repository()
        self.repository.apply(self.records[0])
        for stream in STREAMS:
            self._record(StreamCreated(stream, ("k",)))
        self.hosts: dict[str, HostedReplica] = {}
        self.writers: dict[str, Writer] = {stream: Writer(self, stream) for stream in STREAMS}
        self.versions = dict.fromkeys(STREAMS, 0)
        self.readable: dict[str, dict[int, bytes]] = {stream: {} for stream in STREAMS}
        self.faults = StreamFaults(clock=lambda: self.now)
        self.log_server = LogServer("k")
        self.rolled_back = self.silent = False
        self.barriers = Barriers(clock=lambda: self.now)
        #: The answer of the log server that has not arrived yet, and when it was asked; None: it is not.
        self.awaited: tuple[float, list[ReplicaReport]] | None = None
        for stream in STREAMS:
            self.hosts[stream] = self._host(stream)
            self.hosts[stream].create(stream, "log")

    def _host(self, stream: str) -> HostedReplica:
        return HostedReplica(
            self.folder / stream,
            segment_bytes=60_000,
            clock=lambda: self.now,
            step=self._step,
        )

    def _record(self, record: Record) -> None:
        if self.repository.apply(record):
            self.records.append(record)

    def _step(self, name: str) -> None:
        if self.steps_left is None:
            return
        self.steps_left -= 1
        if self.steps_left < 0:
            self.crashes[name] = self.crashes.get(name, 0) + 1
            self.steps_left = None
            raise Crash(name)

    def restart_log_server(self) -> None:
        """After a SIGKILL: nothing of the process is left but its files."""
        self.awaited = None
        for stream, host in self.hosts.items():
            host._store.close()
            self.hosts[stream] = self._host(stream)
            self.hosts[stream].recover()
            outcome, reason = self.hosts[stream].outcome
            assert outcome != RecoveryOutcome.INVALID, reason
            status = self.hosts[stream].status()
            assert status.version >= self.versions[stream], "I5: a reported version went back"
            self.check_acknowledged(stream)
            self.writers[stream].open = self.writers[stream].taking_over = False

    def check_acknowledged(self, stream: str) -> None:
        host, writer = self.hosts[stream], self.writers[stream]
        status = host.status()
        there = range(status.low_offset, status.end_offset)
        stored = dict(zip(there, host._store.scan(there.start, there.stop), strict=True))
        if writer.taking_over:
            # The crash hit a take-over, which may have cut off the unfinished transaction.
            writer.forget_unfinished(status.end_offset)
        for offset, data in writer.acknowledged.items():
            assert offset < status.low_offset or stored.get(offset) == data, f"lost {offset}"

    def restart_repository(self) -> None:
        again = Repository()
        for record in self.records:
            again.apply(record)
        assert again.to_record() == self.repository.to_record(), "I11"
        self.repository, self.awaited = again, None

    def roll_back_repository(self) -> None:
        """Put it back from an older copy."""
        del self.records[self.choose.randint(1 + len(STREAMS), len(self.records)) :]
        self.rolled_back = True
        self.log_server = LogServer("k", heard=False)
        self.awaited = None
        self.repository = Repository()
        for record in self.records:
            self.repository.apply(record)

    def ask(self) -> list[ReplicaReport]:
        """The reports that arrive now. Some are held up: then nothing else is asked until they arrive."""
        if self.awaited is not None:
            if self.choose.random() < 0.6:
                return []
            (_, arrived), self.awaited = self.awaited, None
            return arrived
        reports = self.shown()
        if reports and not self.rolled_back and self.choose.random() < 0.1:
            self.hold_up(reports)
            return []
        return reports

    def hold_up(self, reports: list[ReplicaReport]) -> None:
        """This answer of the log server arrives later."""
        self.awaited = self.now, reports

    def shown(self) -> list[ReplicaReport]:
        """The reports of replicas as they are now."""
        reports: list[ReplicaReport] = []
        for stream in STREAMS:
            report = None if self.silent else self.hosts[stream].report("k")
            if report is not None and (self.rolled_back or self.choose.random() < 0.9):
                self.versions[stream] = max(self.versions[stream], report.version)
                reports.append(report)
        return reports

    def settle(self) -> None:
        """As `session_setup.settle`, by the writer that has lowered the gate."""
        barrier = self.barriers.add({})
        for _ in range(200):
            self.tick()
            if 0 < barrier.version <= self.repository.published:
                return
        raise AssertionError("the barrier is never reached")

    def tick(self) -> None:
        self.now += 0.1
        late = self.awaited is not None
        reports = self.ask()
        if self.silent or self.choose.random() < 0.1:
            self.barriers.add({})
        counted = self.faults.note(self.repository.evaluate(reports))
        assert counted == reports or self.rolled_back or late
        self.log_server.heard |= bool(reports)
        issue = self.faults.refusal(self.repository.streams, [self.log_server]) is None
        known = {stream: its.last for stream, its in self.repository.streams.items()}
        self.issue(reports, issue=issue)
        for stream, its in self.repository.streams.items():
            held = self.hosts[stream]._core.uncommitted_ends
            assert its.last is known[stream] or its.last.position in held or self.rolled_back, "I6"
        for report in counted:
            if self.choose.random() < 0.9:
                missed = self.repository.streams[report.stream].missed(report.version)
                self.hosts[report.stream].commit(missed, int(self.now * 1e6))
                if self.choose.random() < 0.9:
                    taken = self.hosts[report.stream].report("k")
                    assert taken is not None
                    self._record(RepositoryTick(self.now, (taken,), issue=False))
        if not self.rolled_back:
            self.check_readable()

    def issue(self, reports: list[ReplicaReport], *, issue: bool) -> None:
        """As `RepositoryServer._step`."""
        due = self.barriers.due(None if self.awaited is None else self.awaited[0])
        forced = self.repository.forced_version
        positions = tuple(each.positions for each in due)
        self._record(RepositoryTick(self.now, tuple(reports), positions, issue))
        if self.repository.forced_version > forced:
            for barrier in due:
                barrier.version = self.repository.forced_version
                self.barriers.remove(barrier)

    def check_readable(self) -> None:
        """What is published can be read, and is for ever what it was."""
        for stream in STREAMS:
            cut = self.repository.streams[stream].at(self.repository.published)
            assert cut is not None
            status = self.hosts[stream].status()
            known = self.readable[stream]
            start = max(status.low_offset, max(known, default=0) + 1)
            for batch in batches(self.hosts[stream], start, cut.context.end):
                for each in batch:
                    known[each.offset] = each.data

    def trim(self) -> None:
        # A crash in the last tick may have come before what it published was read.
        self.check_readable()
        stream = self.choose.choice(STREAMS)
        limit = self.repository.trim_limit(stream, self.now)
        self.hosts[stream].trim(self.choose.randint(1, limit), FOREVER)

    def run(self, actions: int) -> None:
        for _ in range(actions):
            if self.choose.random() < 0.25:
                self.steps_left = self.choose.randint(0, 12)
            try:
                action = self.choose.random()
                if action < 0.55:
                    self.writers[self.choose.choice(STREAMS)].act()
                elif action < 0.9:
                    self.tick()
                elif action < 0.93:
                    self.trim()
                elif action < 0.95:
                    self.writers[self.choose.choice(STREAMS)].reattach()
                elif action < 0.97:
                    self.restart_repository()
                else:
                    self.restart_log_server()
            except Crash:
                self.restart_log_server()

    def finish(self) -> None:
        """Everything calms down: the rest is written and committed."""
        self.steps_left = None
        for writer in self.writers.values():
            writer.finish()
        for _ in range(60):
            self.tick()
        for stream, writer in self.writers.items():
            committed = [self.readable[stream][o] for o in sorted(self.readable[stream])]
            assert sorted(self.readable[stream]) == list(range(1, len(committed) + 1)), "I2"
            previous = 0
            for data in committed:
                previous = entry.verify(data, previous).crc
            messages = [
                m for data in committed for m in entry.split_messages(entry.read_payload(data))
            ]
            assert messages == writer.expected(), "each transaction once, in order"


class Writer:
    """Sends transactions of one to six entries, some of them together."""

    def __init__(self, simulation: Simulation, stream: str) -> None:
        self.simulation = simulation
        self.stream = stream
        self.choose = simulation.choose
        self.rows: dict[tuple[int, int], list[bytes]] = {}
        #: How many transactions each earlier history has, and where the present one begins.
        self.ended: list[int] = []
        self.history_start = 1
        self.open = False
        self.taking_over = False
        self.term = 0
        self.sent = 0
        self.pieces: list[list[bytes]] = []
        self.acknowledged: dict[int, bytes] = {}

    def transaction(self, number: int, history: int | None = None) -> list[bytes]:
        key = len(self.ended) if history is None else history, number
        if key not in self.rows:
            size, count = self.choose.choice(((10, 1), (10, 3), (3000, 6), (20_000, 2)))
            self.rows[key] = [
                pg.insert(ACCOUNTS, [self.choose.randbytes(size)]) for _ in range(count)
            ]
        return pg.transaction(0x1000 + 0x100 * number, 700 + number, self.rows[key])

    def expected(self) -> list[bytes]:
        counts = [*self.ended, self.sent]
        return [
            m for h, sent in enumerate(counts) for n in range(sent) for m in self.transaction(n, h)
        ]

    def reattach(self) -> None:
        """As `provisioning.reattach`: what is not committed is removed, then comes the RESTART entry."""
        if self.simulation.awaited is None and self.choose.random() < 0.5:
            # The log server has just been asked.
            self.act()
            self.simulation.hold_up(self.simulation.shown())
        self._take_over()
        # No more may be committed, and what is on its way has to have arrived.
        self.simulation.hosts[self.stream].append(self.session, [], [], None, 0)
        self.simulation.settle()
        host = self.simulation.hosts[self.stream]
        end = host.status().committed_end
        if host._core.tail.whole.history_start > end:
            # Not committed yet: it is never cut off.
            with pytest.raises(InvalidReplicaError, match="RESTART"):
                host.cut_tail(self.term, end)
            return
        if self.choose.random() < 0.3:
            self.simulation.restart_log_server()
            self.simulation.tick()
            host = self.simulation.hosts[self.stream]
        self.acknowledged = {o: data for o, data in self.acknowledged.items() if o < end}
        host.cut_tail(self.term, end)
        self._take_over()
        entry_of = build_restart(self.crc)
        self.open = False
        host.append(self.session, [entry_of], [], WalPosition(1, 0x10), 0, 7)
        self.acknowledged[self.end] = entry_of

    def _take_over(self) -> None:
        host = self.simulation.hosts[self.stream]
        self.term += 1
        self.taking_over = True
        self.session, status = host.open_writer(self.term)
        self.taking_over = False
        self.open = True
        self.crc = status.last_crc
        whole = host._core.tail.whole
        if whole.history_start != self.history_start:
            assert whole.history_start > self.history_start
            self.history_start = whole.history_start
            self.ended.append(self.sent)
        self.forget_unfinished(status.end_offset)
        self.end = status.end_offset
        # As capture: go on behind the last transaction that the log has.
        last = status.last_end_lsn
        self.sent = (last - pg.COMMIT_RECORD - 0x1000) // 0x100 + 1 if last else 0
        self.pieces = []

    def forget_unfinished(self, end: int) -> None:
        for offset in [o for o in self.acknowledged if o >= end]:
            data = self.acknowledged.pop(offset)
            assert not entry.read_header(data).ends_transaction, f"lost {offset}"

    def act(self) -> None:
        if not self.open or self.choose.random() < 0.03:
            self._take_over()
        if not self.pieces:
            messages = self.transaction(self.sent)
            if self.choose.random() < 0.5:
                self.pieces = [[m] for m in messages]
            else:
                self.pieces = [messages]
            self.sent += 1
        count = self.choose.randint(1, 3)
        pieces, self.pieces = self.pieces[:count], self.pieces[count:]
        self._append(pieces)

    def _append(self, pieces: list[list[bytes]]) -> None:
        entries = []
        crc = self.crc
        for piece in pieces:
            data = entry.build_entry(
                piece,
                timeline=1,
                previous_crc=crc,
                schema_hashes=HASHES,
                codec=entry.Codec.NONE,
            )
            crc = entry.read_header(data).crc
            entries.append(data)
        host = self.simulation.hosts[self.stream]
        host.append(self.session, entries, list(SCHEMAS.values()), None, 2**64 - 1)
        for data in entries:
            self.acknowledged[self.end] = data
            self.end += 1
        self.crc = crc

    def finish(self) -> None:
        self._take_over()
        for number in range(self.sent, self.sent + 3):
            self._append([self.transaction(number)])
        self.sent += 3


def run(folder: Path, seed: int, actions: int) -> dict[str, int]:
    print(f"seed {seed}")
    simulation = Simulation(folder, seed)
    try:
        simulation.run(actions)
        simulation.finish()
    finally:
        for host in simulation.hosts.values():
            host.close()
        shutil.rmtree(folder)
    return simulation.crashes


@pytest.mark.parametrize("number", range(3))
def test_a_repository_put_back_issues_no_version_that_a_replica_knows(
    tmp_path: Path, seed: int, number: int
) -> None:
    simulation = Simulation(tmp_path / "sim", seed * 1000 + number)
    simulation.run(100)
    simulation.steps_left = None
    reports = [host.report("k") for host in simulation.hosts.values()]
    known = max(report.version for report in reports if report)
    simulation.roll_back_repository()
    version = simulation.repository.version
    for turn in range(20):
        simulation.silent = turn < 10
        for writer in simulation.writers.values():
            writer.act()
        simulation.tick()
        assert simulation.repository.version == version or version >= known
    for host in simulation.hosts.values():
        host.close()


@pytest.mark.parametrize("number", range(3))
def test_crashes_between_any_two_steps(tmp_path: Path, seed: int, number: int) -> None:
    run(tmp_path / "sim", seed * 1000 + number, 250)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_crashes_between_any_two_steps_for_long(tmp_path: Path, seed: int) -> None:
    crashes: dict[str, int] = {}
    for number in range(25):
        for name, count in run(tmp_path / "sim", seed * 10_000 + number, 600).items():
            crashes[name] = crashes.get(name, 0) + count
    print(crashes)
    assert set(crashes) == {
        *("log-effect", "log-before-commit", "log-after-commit"),
        *("log-roll-copied", "log-roll-durable", "log-roll-renamed"),
        *("log-trim-durable", "log-trim-dropped"),
    }


# -- mutants ----------------------------------------------------------------------------------------


def _awaited_reports_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Barriers, "due", lambda self, _: self.unforced())


def _gates_are_not_durable(patch: pytest.MonkeyPatch) -> None:
    really = Replica.append

    def append(self: Replica, *arguments: Any) -> list[Effect]:
        before = self.durable
        effects = really(self, *arguments)
        if effects != [PutDurable(replace(before, gate_lsn=self.durable.gate_lsn))]:
            return effects
        self.durable = before
        return []

    patch.setattr(Replica, "append", append)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a barrier does not wait for reports that were asked for before it": _awaited_reports_are_forgotten,
    "a gate that is lowered is not durable": _gates_are_not_durable,
}


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulator_finds_the_mutant(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """About one seed in ten does."""
    MUTANTS[name](monkeypatch)
    for number in range(150):
        try:
            run(tmp_path / "sim", number, 250)
        except (AssertionError, TusklineError) as error:
            print(f"{name}: {error!r}")
            return
    pytest.fail(f"{name}: nothing was noticed")
