"""A stream whose capture is slow, or stands still, delays its own tables alone: its lag is told, and no epoch is wrong."""

import json
import os
import random
import signal
import time

import pytest

from spark_consumers import Source, read
from spark_consumers.lake.flush import flush
from tests.spark.test_bank import (
    PATIENCE,
    assert_epochs_hold,
    assert_equal_everywhere,
    shown,
)
from tests.support import two_banks
from tests.support.child import run_tuskline
from tests.support.servers import MakeServer
from tests.support.stack import Stack
from tests.support.suspended import suspend
from tests.support.two_banks import BANKS
from tests.support.waiting import wait_for
from walsender_bridge.errors import DeadlineError
from walsender_bridge.runtime.supervisor import read_states

USUAL, SLOW = BANKS
#: How many transfers have to arrive of the one bank while the other's stream stands still.
ARRIVED = 30


def capture_of(stack, bank):
    child = read_states(stack.directory / "log" / "run", "bridge").children[f"capture-{bank}"]
    assert child.pid
    return child.pid


def lag_of(stack, bank):
    """What `tuskline lag` says of a bank's stages."""
    done = run_tuskline(["lag", "--json", "--config", str(stack.config)])
    assert done.returncode == 0, done.stderr
    stages = json.loads(done.stdout)["sources"]
    return {each["stage"]: each for each in stages if each["source"] == bank}


@pytest.mark.timeout(1800)
def test_15_a_slow_stream_delays_its_own_tables_and_shows_its_lag(
    tmp_path, make_server: MakeServer, spark, seed
):
    print(f"seed {seed}")
    draw, dsns = random.Random(seed), two_banks.servers(make_server)
    sources = [Source(bank, dsn, f"tuskline_{bank}") for bank, dsn in dsns.items()]
    with Stack(tmp_path, dsns) as stack:
        stack.start("log-server", "bridge", "lake")
        wait_for(lambda: shown(stack.lake), PATIENCE, f"all tables\n{stack.logs()}")

        def moves():
            found = two_banks.figures_of(read(spark, stack.lake))
            return {bank: figures["moves"] for bank, figures in found.items()}

        pid = capture_of(stack, SLOW)
        with two_banks.load(dsns, seed):
            suspend(pid)
            try:
                # What was in the log by now is shown, and then nothing more of this stream.
                flush(stack.lake, stack.log_address, [sources[0]], timeout=PATIENCE)
                before = moves()
                wait_for(
                    lambda: moves()[USUAL] >= before[USUAL] + ARRIVED,
                    PATIENCE,
                    f"{ARRIVED} transfers of {USUAL}\n{stack.logs()}",
                )
                assert moves()[SLOW] == before[SLOW]
                wait_for(
                    lambda: (lag_of(stack, SLOW)["capture"]["seconds"] or 0) > 3,
                    PATIENCE,
                    "the lag grows",
                )
                assert lag_of(stack, SLOW)["capture"]["bytes"] > 0
                with pytest.raises(DeadlineError, match=SLOW):
                    flush(stack.lake, stack.log_address, sources, timeout=2)
                # Slow, then: it works for moments.
                for _ in range(10):
                    os.kill(pid, signal.SIGCONT)
                    time.sleep(draw.uniform(0.02, 0.3))
                    suspend(pid)
                    time.sleep(draw.uniform(0.1, 0.5))
            finally:
                os.kill(pid, signal.SIGCONT)
        flush(stack.lake, stack.log_address, sources, timeout=PATIENCE)
        assert_equal_everywhere(dsns, read(spark, stack.lake))
        assert lag_of(stack, SLOW)["merge"]["versions"] is not None
        print(f"{assert_epochs_hold(spark, stack.lake)} epochs")
