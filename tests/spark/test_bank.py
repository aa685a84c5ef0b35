"""Banks on two servers, read by three processes with JVMs of their own, live and from the lake, while every part is killed."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spark_consumers import Source, read
from spark_consumers.lake.flush import flush
from spark_consumers.lake.manifest.chain import open_chain
from tests.support import bank_reader, two_banks
from tests.support.bank_reader import LAKE, LIVE
from tests.support.child import ROOT
from tests.support.lake_check import assert_equal
from tests.support.servers import MakeServer
from tests.support.stack import Stack
from tests.support.table_format import DELTA, chosen
from tests.support.two_banks import BANKS
from tests.support.waiting import wait_for
from walsender_bridge.runtime.processes import alive
from walsender_bridge.runtime.supervisor import read_states

READERS = 3
#: The errors of a part that is down, and of an epoch, or its Delta versions, that are not there yet. Every other one is a fault.
REFUSALS = {
    "UNAVAILABLE": ("",),
    "LAKE": (
        "this session has read epoch",
        "the table has no Delta log",
        "the table's Delta log does not show snapshot",
    ),
}
#: Seconds for what has to go on behind a kill, on a machine that is busy with others.
PATIENCE = 240
#: Epochs of which Delta reads all tables, at most: that takes seconds for each.
BY_DELTA = 12


class Reader:
    """A reader that is killed and started again, and all that it has read."""

    def __init__(self, folder: Path, stack: Stack, number: int, seed: int) -> None:
        self._stack, self._number, self._seed = stack, number, seed
        self.file = folder / f"reader-{number}.jsonl"
        self._output = folder / f"reader-{number}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def start(self) -> None:
        self._starts += 1
        told = [self._stack.lake, self._stack.log_address, f"{self._seed + 1000 * self._starts}"]
        command = [sys.executable, "-m", "tests.support.bank_reader", *told, str(self.file)]
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def kill(self) -> None:
        """SIGKILL: its JVM ends by itself, behind it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def reads(self) -> list[dict[str, Any]]:
        """What it has read. Fails if it has ended by itself."""
        if self._process is not None:
            assert self._process.poll() is None, self._output.read_text()[-4000:]
        return bank_reader.reads(self.file)

    def done(self, kind: str, since: float) -> bool:
        """Whether a read of this kind that began after this time has been answered."""
        return any(
            line["kind"] == kind and line["began"] >= since and "epoch" in line
            for line in self.reads()
        )


class Parts:
    """What is killed: the parts that run the system, and a reader."""

    def __init__(self, stack: Stack, readers: list[Reader], draw: random.Random) -> None:
        self._stack, self._readers, self._draw = stack, readers, draw

    def kill(self, kind: str) -> None:
        """SIGKILL one, and start it again if nothing else does."""
        if kind == "reader":
            reader = self._draw.choice(self._readers)
            reader.kill()
            reader.start()
        elif kind == "capture":
            self._kill_child("bridge", f"capture-{self._draw.choice(BANKS)}")
        else:
            self._stack.kill(kind)
            time.sleep(self._draw.uniform(0, 2))
            self._stack.start(kind)

    def _kill_child(self, supervisor: str, name: str) -> None:
        run = self._stack.directory / "log" / "run"

        def pid() -> int | None:
            child = read_states(run, supervisor).children.get(name)
            return child.pid if child is not None and child.pid and alive(child.pid) else None

        os.kill(wait_for(pid, PATIENCE, f"{name} runs"), signal.SIGKILL)


def judged(reads: list[dict[str, Any]]) -> Counter[str]:
    """How many reads were answered, of each kind. Fails for a wrong sum, one that went back, and an error that is a fault.

    `reads` are those of processes that followed one another: what one of them has read from the lake, the next one does
    too, and likewise live.
    """
    newest: Counter[str] = Counter()
    of_session: Counter[int] = Counter()
    answered: Counter[str] = Counter()
    for line in reads:
        if "error" in line:
            assert line["error"] in REFUSALS, line
            assert any(text in line["what"] for text in REFUSALS[line["error"]]), line
            answered["refused"] += 1
            continue
        assert not line["wrongs"], line
        kind, epoch, process = line["kind"], line["epoch"], line["pid"]
        before = max(of_session[process], newest[kind], newest[LAKE] if kind == LIVE else 0)
        assert epoch >= before, (before, line)
        newest[kind] = of_session[process] = epoch
        answered[kind] += 1
    return answered


def assert_epochs_hold(spark, lake: str) -> int:
    """Every epoch that is kept has the sums of both banks, from the first that has all of their tables on; how many were read.

    By Delta, some of them.
    """
    wanted = {f"{bank}.public.{name}" for bank in BANKS for name in two_banks.NAMES}
    kept = {link.epoch for link in open_chain(lake).links() if wanted <= {*link.readable}}
    epochs = sorted(kept, reverse=True)
    if chosen() == DELTA:
        epochs = epochs[:: max(1, -(-len(epochs) // BY_DELTA))]
    for epoch in epochs:
        figures = two_banks.figures_of(read(spark, lake, epoch=epoch))
        for bank in BANKS:
            assert not two_banks.wrongs(bank, figures[bank]), epoch
    return len(epochs)


def assert_equal_everywhere(dsns, snapshot) -> None:
    """Each server's tables, and the sums over both."""
    assert_between(snapshot)
    for bank, dsn in dsns.items():
        own = {name for name in snapshot.tables if name.startswith(f"{bank}.")}
        assert own == {f"{bank}.public.{name}" for name in two_banks.NAMES}
        assert_equal(dsn, snapshot, counted=False, only=own)


def assert_between(snapshot) -> None:
    assert not two_banks.wrongs_between(two_banks.figures_of(snapshot))


KINDS = ("capture", "log-server", "lake", "reader")


@pytest.mark.parametrize(
    ("seconds", "interval"),
    [
        pytest.param(90, 1.0, id="90s", marks=pytest.mark.timeout(1800)),
        pytest.param(600, 4.0, id="10min", marks=[pytest.mark.long, pytest.mark.timeout(2700)]),
    ],
)
def test_1_2_3_three_readers_of_two_banks_see_whole_epochs_that_never_go_back(
    tmp_path, make_server: MakeServer, spark, seed, seconds, interval
):
    """1: every read has the sums of each bank. 2: none is older than one before. 3: no transaction is split.

    Behind a quiesce and a flush both banks are equal to their servers, live and in the lake, and no wire is in flight.
    """
    draw = random.Random(seed)
    dsns = two_banks.servers(make_server)
    with ExitStack() as ends:
        stack = ends.enter_context(Stack(tmp_path, dsns, epoch_interval=interval))
        stack.start("log-server", "bridge", "lake")
        wait_for(lambda: shown(stack.lake), PATIENCE, f"all tables\n{stack.logs()}")
        readers = [Reader(tmp_path, stack, number, seed + number) for number in range(READERS)]
        for reader in readers:
            reader.start()
            ends.callback(reader.kill)
        with two_banks.load(dsns, seed):
            wait_for_reads(readers, 0.0)
            until = time.monotonic() + seconds
            parts, kills = Parts(stack, readers, draw), 0
            while time.monotonic() < until:
                order = draw.sample(KINDS, len(KINDS))
                print(f"seed {seed}: {order}")
                for kind in order:
                    if time.monotonic() >= until and kills >= len(KINDS):
                        break
                    time.sleep(draw.uniform(2, 8))
                    parts.kill(kind)
                    kills += 1
        sources = [Source(bank, dsn, f"tuskline_{bank}") for bank, dsn in dsns.items()]
        flush(stack.lake, stack.log_address, sources, timeout=PATIENCE)
        # Each reader goes on behind the last kill, and has then shown all that it is for: what follows needs the processor.
        wait_for_reads(readers, time.time())
        found = [judged(reader.reads()) for reader in readers]
        for reader in readers:
            reader.kill()
        assert_equal_everywhere(dsns, read(spark, stack.lake))
        assert_equal_everywhere(dsns, read(spark, stack.lake, live=True, log=stack.log_address))
        epochs = assert_epochs_hold(spark, stack.lake)
        print(
            f"seed {seed}: {kills} kills, {epochs} epochs; reads: {[dict(each) for each in found]}"
        )
        assert all(each[LIVE] >= 2 and each[LAKE] >= 2 for each in found)
        assert sum(each[LIVE] for each in found) >= 5 * READERS


def shown(lake: str) -> bool:
    """Whether the newest epoch has all tables of both banks."""
    try:
        head = open_chain(lake).head()
    except Exception:
        return False
    return head is not None and len(head.readable) == len(BANKS) * len(two_banks.NAMES)


def wait_for_reads(readers: list[Reader], since: float) -> None:
    """Wait until each reader has read both ways after this time."""
    patience = PATIENCE * (1 + (chosen() == DELTA))
    for reader in readers:
        for kind in (LIVE, LAKE):
            done = partial(reader.done, kind, since)
            wait_for(done, patience, f"{reader.file.name}: {kind}")
