"""A whole pipeline with `[tls]`: capture, log, lake, and a reader with a certificate for one stream."""

import signal

import pytest

from spark_consumers import read
from tests.support.stack import Stack
from tests.support.suspended import suspend
from tests.support.tls import HOSTS, SERVER, Authority, replace_files
from tests.support.waiting import wait_for
from walsender_bridge.config import load_config
from walsender_bridge.errors import Cause, TusklineError
from walsender_bridge.runtime.processes import alive
from walsender_bridge.runtime.supervisor import read_states
from walsender_bridge.runtime.tls_files import with_files

ROWS = 1000


def did(stack, *command):
    done = stack.cli(*command)
    assert done.returncode == 0, done.stderr


def changed(spark, lake, log):
    """How many rows a live read finds changed."""
    found = read(spark, lake, live=True, log=log, consumer="reader")
    return found["shop.public.orders"].where("body = 'live'").count()


@pytest.mark.timeout(300)
def test_a_pipeline_with_certificates_goes_on_when_they_are_replaced(tmp_path, database, spark):
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, body text)",
        f"INSERT INTO orders SELECT g, 'x' FROM generate_series(1, {ROWS}) AS g",
    )
    authority = Authority(tmp_path)
    roles = (*SERVER, "writer", "lake", "operator")
    own = authority.issue(*roles, hosts=HOSTS)
    with Stack(tmp_path, {"shop": database.dsn}, epoch_interval=0.5) as stack:
        section = (
            f'\n[tls]\nca = "{own.ca}"\ncertificate = "{own.certificate}"\nkey = "{own.key}"\n'
        )
        stack.config.write_text(stack.config.read_text() + section)
        did(stack, "init")
        stack.start("log-server", "bridge", "lake")
        run_dir = load_config(stack.config).run_dir
        wait_for(lambda: alive(read_states(run_dir, "bridge").pid), 60, "the bridge runs")
        did(stack, "flush")
        assert read(spark, stack.lake)["shop.public.orders"].count() == ROWS

        replace_files(own, authority.issue(*roles, hosts=HOSTS))
        database.execute(
            f"INSERT INTO orders SELECT g, 'y' FROM generate_series(1001, {2 * ROWS}) g"
        )
        did(stack, "flush")
        assert read(spark, stack.lake)["shop.public.orders"].count() == 2 * ROWS

        address = load_config(stack.config).log.listen
        changes = spark.read.format("tuskline").option("tables", "shop.public.orders")
        reader = with_files(address, authority.issue("reader", streams=("shop",)))
        # The first rows were copied, and are not in the log.
        assert changes.option("log", reader).load().count() == ROWS
        live = read(spark, stack.lake, live=True, log=reader, consumer="reader")
        assert live["shop.public.orders"].count() == 2 * ROWS
        # No epoch has this: a live read has to read the stream, of which a stranger's would otherwise need nothing.
        suspend(stack.pid("lake"))
        database.execute("UPDATE orders SET body = 'live' WHERE id <= 10")
        wait_for(lambda: changed(spark, stack.lake, reader) == 10, 60, "the log has it")
        # Another one's name, another one's stream.
        with pytest.raises(TusklineError, match="does not allow"):
            read(spark, stack.lake, live=True, log=reader)
        stranger = with_files(address, authority.issue("reader", streams=("bank",)))
        with pytest.raises(TusklineError):
            read(spark, stack.lake, live=True, log=stranger, consumer="reader")
        stack.signal("lake", signal.SIGCONT)
        for other in (
            with_files(address, authority.issue("reader", streams=("bank",))),
            with_files(address, authority.issue("monitor")),
        ):
            with pytest.raises(Exception, match="does not allow"):
                changes.option("log", other).load().count()
        without = stack.config.read_text().replace(section, "")
        stack.config.write_text(without)
        assert stack.cli("status").returncode == Cause.UNAVAILABLE
        stack.config.write_text(without + section)
