"""A lake in a bucket whose keys live for seconds: they are renewed under a running driver, or it ends by name."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from spark_consumers import Source, read
from spark_consumers.lake.flush import flush
from spark_consumers.lake.manifest.chain import open_chain
from tests.support import bank_load, short_keys
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.s3 import BUCKET, KEYS, FaultProxy, options_at
from tests.support.short_keys import ShortKeys
from tests.support.stack import Stack
from tests.support.waiting import wait_for
from walsender_bridge.errors import Cause

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
#: Seconds that keys live: the JVM's client renews them a minute before their end, and uses them until then.
LIFE = 80.0


@pytest.fixture
def store(tmp_path, s3_port, monkeypatch):
    """A server that knows keys for as long as they live; how the test itself reaches it, with keys that last."""
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    proxy = FaultProxy(s3_port)
    with proxy.running(), ShortKeys(tmp_path, LIFE).running() as keys:
        proxy.accepts, proxy.signed = keys.accepts, short_keys.signed
        yield keys, proxy.port


@contextmanager
def driven(folder, database, port):
    """Log and bridge of a lake that is reached by `port`; its driver is started by the test."""
    database.execute(*bank_load.TABLES)
    lines = f'endpoint = "http://127.0.0.1:{port}"\nregion = "us-east-1"\nallow_http = true\n'
    uri = f"s3://{BUCKET}/{folder.name}/lake"
    sources = {"shop": database.dsn}
    with Stack(folder, sources, epoch_interval=0.5, lake=lines, uri=uri) as stack:
        stack.start("log-server", "bridge")
        yield stack


def head(stack, store):
    return open_chain(stack.lake, store).head()


def all_shown(stack, store):
    found = head(stack, store)
    return found is not None and len(found.readable) == 3


_READER = """
import json, sys, time
from tests.support.s3 import options_at
from tuskline import read, session

lake, port = sys.argv[1], int(sys.argv[2])
options = options_at(port)
spark = session("reader", lake=lake, endpoint=options.endpoint, region=options.region)
while True:
    snap = read(spark, lake, store=options)
    sums = {name: snap[name].count() for name in snap.tables}
    print(json.dumps([snap.epoch, sums]), flush=True)
    time.sleep(2)
"""


def test_keys_of_a_role_are_renewed_in_driver_executors_and_readers(
    tmp_path, database, spark, s3_port, store, monkeypatch, seed
):
    keys, port = store
    output = tmp_path / "reader.out"
    with driven(tmp_path, database, port) as stack:
        stack.start("lake", env=keys.environment())
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        direct = options_at(s3_port)
        wait_for(lambda: all_shown(stack, direct), 240, "the first epoch")
        without = {name: value for name, value in os.environ.items() if name not in KEYS}
        with output.open("wb") as written, (tmp_path / "reader.err").open("wb") as errors:
            reader = subprocess.Popen(
                [sys.executable, "-c", _READER, stack.lake, str(port)],
                env=without | keys.environment(),
                stdout=written,
                stderr=errors,
            )
        try:
            wait_for(output.read_bytes, 180, "the reader reads")
            driver, began = stack.pid("lake"), time.monotonic()
            with bank_load.load(database.dsn, seed):
                wait_for(lambda: time.monotonic() - began > 2.5 * LIFE, 600, "keys expire")
                epoch = head(stack, direct).epoch
                wait_for(lambda: head(stack, direct).epoch > epoch, 60, "epochs go on")
                seen = len(output.read_bytes())
                wait_for(lambda: len(output.read_bytes()) > seen, 60, "the reader goes on")
            assert stack.pid("lake") == driver
            assert reader.poll() is None, (tmp_path / "reader.err").read_text()[-3000:]
        finally:
            reader.kill()
            reader.wait()
        epochs = [json.loads(line)[0] for line in output.read_text().splitlines()]
        assert epochs == sorted(epochs)
        assert epochs[-1] > epochs[0]
        assert len(keys.used) > 3
        assert "refuses access" not in (tmp_path / "lake.log").read_text()
        whole_and_clean(stack, database, spark, direct)


def test_keys_that_expire_in_the_environment_end_the_driver_by_name(
    tmp_path, database, spark, s3_port, store, monkeypatch, seed
):
    keys, port = store
    with driven(tmp_path, database, port) as stack:
        stack.start("lake", env=keys.in_environment())
        with monkeypatch.context() as ours:
            for name, value in KEYS.items():
                ours.setenv(name, value)
            direct = options_at(s3_port)
            wait_for(lambda: all_shown(stack, direct), 240, "the first epoch")
            with bank_load.load(database.dsn, seed):
                epoch = head(stack, direct).epoch
                wait_for(lambda: head(stack, direct).epoch > epoch, 120, "epochs under load")
                keys.expire()
                assert stack.wait("lake", 120) == Cause.LAKE
                log = (tmp_path / "lake.log").read_text()
                assert "the object store refuses access (ExpiredToken)" in log
                assert "HINT:  the keys in the environment have expired" in log
                bank_load.check(read(spark, stack.lake, store=direct))
        stack.start("lake", env=keys.in_environment())
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        whole_and_clean(stack, database, spark, direct)


def whole_and_clean(stack, database, spark, store):
    """All that was committed is there, once; each epoch is whole; and nothing is in the bucket that nobody needs."""
    source = Source("shop", database.dsn, "tuskline_shop")
    flush(stack.lake, stack.log_address, [source], timeout=240, store=store)
    assert stack.stop("lake", 120) == 0
    assert_equal(database.dsn, read(spark, stack.lake, store=store))
    for epoch in {m.epoch for m in open_chain(stack.lake, store).links() if len(m.readable) == 3}:
        bank_load.check(read(spark, stack.lake, epoch=epoch, store=store))
    assert_no_orphans(spark, stack.lake, store)
