"""Fixtures of every folder, and what this machine has and lacks for the tests, printed."""

import os

import hypothesis
import pytest

from tests.support import (
    containers,
    etcd,
    extension,
    order,
    pgbouncer,
    ports,
    resume,
    s3,
    servers,
    spark_jvm,
    spark_server,
    table_format,
)
from tests.support.containers import container_dsn
from tests.support.s3 import s3_keys, s3_port
from tests.support.servers import database, make_server, pg_server, pg_servers
from tests.support.spark import spark
from walsender_bridge.demo.local_server import by_major
from walsender_bridge.demo.local_server import free_port as find_free_port
from walsender_bridge.runtime import gc_control

__all__ = [
    "container_dsn",
    "database",
    "make_server",
    "pg_server",
    "pg_servers",
    "s3_keys",
    "s3_port",
    "spark",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    resume.add_options(parser)
    table_format.add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    resume.configure(config)
    spark_jvm.set_up(os.environ)
    ports.share(os.environ)
    # Nothing here computes with matrices: without its threads numpy is imported at half the cost.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A fifth of what a simulation takes was the garbage collector, which found nothing.
    gc_control.collect_rarely()
    # A busy machine is not a fault of an example; and the run's seed is hypothesis's too.
    hypothesis.settings.register_profile("tuskline", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("tuskline")
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(config.getoption("--seed"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = order.places(dict.fromkeys(item.path for item in items))
    items.sort(key=lambda item: places[item.path])


@pytest.fixture
def seed() -> int:
    """The run's seed (`--seed`), for tests that draw at random; a failure is repeated with it."""
    return int(os.environ[resume.SEED])


@pytest.fixture
def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens."""
    return find_free_port()


def _inventory() -> list[str]:
    found = [f"{each.version} ({each.origin})" for each in by_major().values()]
    lacking = ", ".join(map(str, servers.missing()))
    return [
        f"seed: {os.environ[resume.SEED]}",
        f"PostgreSQL: {', '.join(found)}" + (f"; not here: {lacking}" if lacking else ""),
        f"headers for the extension: {', '.join(map(str, extension.buildable())) or 'none'}",
        f"etcd: {etcd.missing() or etcd.PROGRAM}",
        f"S3: {s3.described()}",
        f"PgBouncer: {pgbouncer.described()}",
        f"Spark Connect: {spark_server.missing_connect() or spark_server.CLIENT}",
        f"containers: {containers.missing() or containers.IMAGE}",
    ]


def pytest_report_header() -> list[str]:
    return _inventory()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("servers")
    for line in _inventory():
        terminalreporter.line(line)
