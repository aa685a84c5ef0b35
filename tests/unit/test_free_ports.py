"""Ports of local servers: each process draws from a range of its own."""

from itertools import pairwise

import pytest

from tests.support import ports
from walsender_bridge.demo.local_server import free_port, free_ports, server
from walsender_bridge.errors import LocalServerError


def range_of(worker: int, count: int) -> range:
    environ = {"PYTEST_XDIST_WORKER": f"gw{worker}", "PYTEST_XDIST_WORKER_COUNT": str(count)}
    ports.share(environ)
    first, last = map(int, environ["TUSKLINE_PORTS"].split("-"))
    return range(first, last + 1)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_workers_of_one_run_draw_no_port_of_each_other(count):
    ranges = [range_of(worker, count) for worker in range(count)]
    assert all(len(each) > 2000 for each in ranges)
    assert all(a.stop <= b.start for a, b in pairwise(ranges))


def test_a_run_without_workers_and_a_range_of_the_caller_s_stay_as_they_are():
    environ: dict[str, str] = {}
    ports.share(environ)
    assert not environ
    environ = {
        "PYTEST_XDIST_WORKER": "gw0",
        "PYTEST_XDIST_WORKER_COUNT": "2",
        "TUSKLINE_PORTS": "1-9",
    }
    ports.share(environ)
    assert environ["TUSKLINE_PORTS"] == "1-9"


def test_ports_come_from_the_range_that_is_set(monkeypatch):
    monkeypatch.setattr(server, "_given", set())
    monkeypatch.setenv("TUSKLINE_PORTS", "31000-31199")
    drawn = [free_port() for _ in range(20)]
    assert len(set(drawn)) == 20
    assert all(31_000 <= port <= 31_199 for port in [*drawn, *free_ports(3)])


@pytest.mark.parametrize("text", ["", "x", "5", "9-1", "0-10", "1-65536"])
def test_what_is_no_range_is_named(monkeypatch, text):
    monkeypatch.setenv("TUSKLINE_PORTS", text)
    with pytest.raises(LocalServerError, match="not a range of ports") as raised:
        free_port()
    assert raised.value.where == "TUSKLINE_PORTS"
