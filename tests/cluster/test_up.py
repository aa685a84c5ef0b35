"""`tuskline up`, `status`, `lag`, `down`, `top` and the metrics endpoint, on a real server, without Spark."""

import asyncio
import json
import os
import re
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families
from textual.widgets import Static

from tests.support.attached import Attached, difference, server_state
from tests.support.capture_stack import make_tables, wal_end
from tests.support.servers import Database, MakeServer, drop_slot
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.cli.top import Top
from walsender_bridge.config import load_config
from walsender_bridge.errors import Cause, TusklineError
from walsender_bridge.observability.observation import Observer
from walsender_bridge.runtime import pid_file, processes

SECRET = "planted-secret-77de"
METRICS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture
def tuskline(tmp_path: Path, shop: Database) -> Iterator[Attached]:
    """Attached as a role whose password is planted: it may be seen nowhere."""
    role = f"up_{shop.name}"
    shop.execute(f"CREATE ROLE {role} SUPERUSER LOGIN PASSWORD '{SECRET}'")
    dsn = shop.server.dsn(shop.name, user=role, password=SECRET)
    source = {"dsn": dsn, "tables": ["public.orders", "public.audit"]}
    with Attached(tmp_path, {"shop": source}, metrics=True) as attached:
        yield attached
    with shop.connect() as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", [role]
        )
        connection.execute(f"DROP OWNED BY {role} CASCADE".encode())
        connection.execute(f"DROP ROLE {role}".encode())


def is_healthy(tuskline: Attached) -> bool:
    return not ill(tuskline)


def ill(tuskline: Attached) -> list[str]:
    """What does not run as it should."""
    with Observer(load_config(tuskline.config)) as observer:
        return observer.observe().problems


def fetch(tuskline: Attached, path: str) -> tuple[int, str]:
    """An answer of the endpoint; 0 while it does not listen."""
    try:
        with urllib.request.urlopen(
            f"http://{tuskline.metrics_listen}{path}", timeout=15
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


def committed(tuskline: Attached, shop: Database) -> bool:
    """Whether the log has what is committed by now."""
    with shop.connect() as connection:
        end = wal_end(connection)
        connection.execute("UPDATE tuskline.flush SET token = token + 1")

    def is_there() -> bool:
        try:
            with LogClient(f"grpc://{tuskline.log_listen}") as log:
                cut = log.status().streams.get("shop")
        except TusklineError:
            return False
        return cut is not None and cut.last_end_lsn > end

    return bool(wait_for(is_there, 60, "the log has it"))


def test_up_runs_everything_and_down_ends_it(tuskline: Attached, shop: Database) -> None:
    before = server_state(shop.dsn)
    tuskline.json("init")
    # Nothing runs: status says so, by its exit code too.
    report = tuskline.json("status", code=Cause.UNAVAILABLE)
    assert report["healthy"] is False
    assert report["up"] is None
    tuskline.up()
    assert tuskline.process is not None
    wait_for(lambda: is_healthy(tuskline), 60, "everything runs")
    shop.execute("INSERT INTO orders SELECT g, 'x' FROM generate_series(1, 1000) AS g")
    committed(tuskline, shop)
    report = tuskline.json("status")
    assert report["up"] == tuskline.process.pid
    assert {row["process"] for row in report["processes"]} == {
        *("up", "log-server", "bridge", "metrics"),
        *("log-server/replicas", "bridge/capture-shop"),
    }
    assert report["slots"][0]["active"] is True
    assert report["log"]["version"] > 0
    # Once only; and nothing is taken back under a running bridge.
    assert "is already running" in tuskline.error_plain("up", code=Cause.RUNNING)
    assert tuskline.error("detach", code=Cause.RUNNING)["repair"] == "tuskline down"
    _check_lag(tuskline)
    _check_endpoint(tuskline)
    _check_secret(tuskline)
    family = processes.family(tuskline.process.pid)
    assert tuskline.json("down")["ended"] == tuskline.process.pid
    assert tuskline.process.wait(30) == 0
    wait_for(lambda: not any(map(processes.alive, family)), 30, "all of them have ended")
    assert tuskline.json("down")["ended"] is None
    tuskline.json("detach")
    assert difference(before, server_state(shop.dsn)) == []


def _check_lag(tuskline: Attached) -> None:
    def calm() -> dict[str, Any] | None:
        report = tuskline.json("lag")
        assert [row["stage"] for row in report["sources"]] == [
            "capture",
            "gate",
            "barrier",
            "merge",
        ]
        quiet = all(row["bytes"] == 0 for row in report["sources"][1:3])
        return report if quiet else None

    report = wait_for(calm, 30, "the log has caught up")
    _, gate, barrier, merge = report["sources"]
    assert (gate["seconds"], barrier["seconds"], barrier["versions"]) == (0.0, 0.0, 0)
    # There is no lake: what is not known is not a number.
    assert (merge["bytes"], merge["versions"], merge["seconds"]) == (None, None, None)


def _check_endpoint(tuskline: Attached) -> None:
    assert fetch(tuskline, "/healthz") == (200, '{"healthy": true}\n')
    assert fetch(tuskline, "/readyz") == (200, '{"ready": true, "reasons": [], "degraded": []}\n')
    assert fetch(tuskline, "/etc/passwd")[0] == 404
    code, text = fetch(tuskline, "/metrics")
    assert code == 200
    families = {family.name: family for family in text_string_to_metric_families(text)}
    value = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert value["tuskline_ready",] == 1
    assert value["tuskline_capture_streaming", "shop"] == 1
    assert value["tuskline_process_up", "bridge/capture-shop"] == 1
    assert value["tuskline_process_resident_memory_bytes", "log-server/replicas"] > 1 << 20
    assert value["tuskline_log_version",] > 0
    assert value["tuskline_log_replicas_missing", "shop"] == value["tuskline_degraded",] == 0
    assert value["tuskline_lag_bytes", "gate", "shop"] == 0
    assert value["tuskline_slot_active", "shop", "tuskline_shop"] == 1
    # The page lists what is served, neither more nor less.
    served = {
        f"{name}_total" if family.type == "counter" else name for name, family in families.items()
    }
    documented = set(re.findall(r"^\| `(tuskline_\w+)` \|", METRICS_PAGE.read_text(), re.MULTILINE))
    assert served == documented


def _check_secret(tuskline: Attached) -> None:
    assert tuskline.process is not None
    seen = [tuskline.logs(100_000), fetch(tuskline, "/metrics")[1], fetch(tuskline, "/readyz")[1]]
    for command in ("status", "lag", "doctor", "init"):
        for form in ([], ["--json"]):
            done = tuskline.run(command, *form)
            seen += [done.stdout, done.stderr]
    for pid in processes.family(tuskline.process.pid):
        seen.append(processes.command_line(pid))
        with suppress(FileNotFoundError):  # it has ended
            seen.append(Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace"))
    for file in tuskline.directory.rglob("*"):
        if file.is_file() and file != tuskline.config:
            with suppress(FileNotFoundError):  # the draft of a status file
                seen.append(file.read_bytes().decode("utf-8", "replace"))
    assert len(seen) > 15
    assert not [text for text in seen if SECRET in text]


def test_a_child_that_is_restarted_has_the_settings_of_its_siblings(
    tuskline: Attached, shop: Database
) -> None:
    """Whatever the configuration file says by then: it may be half edited."""
    tuskline.json("init")
    tuskline.up()
    wait_for(lambda: is_healthy(tuskline), 60, "everything runs")
    settings = load_config(tuskline.config)

    def capture() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(settings.capture_status(settings.source[0]).read_text())
        return found

    def restarted(pid: int) -> bool:
        return capture()["pid"] != pid and capture()["state"] == "streaming"

    text = tuskline.config.read_text()
    for edited in (text.replace("public.audit", "public.gone") + 'slot = "other"\n', "half edi"):
        tuskline.config.write_text(edited)
        before = capture()["pid"]
        os.kill(before, signal.SIGKILL)
        wait_for(partial(restarted, before), 60, "capture streams again")
        assert capture()["slot"] == "tuskline_shop"
    tuskline.config.write_text(text)
    wait_for(lambda: is_healthy(tuskline), 30, "everything runs")


def _restarts(tuskline: Attached, process: str) -> int:
    """How often the supervisor has started a part again."""
    rows = json.loads(tuskline.run("status", "--json").stdout)["processes"]
    return int(next(row["restarts"] for row in rows if row["process"] == process))


def test_a_report_shows_what_was_down(tuskline: Attached, shop: Database, tmp_path: Path) -> None:
    tuskline.up()
    wait_for(lambda: is_healthy(tuskline), 60, "everything runs")
    page = tmp_path / "report.html"

    def kill_bridge() -> None:
        report = tuskline.json("status")
        bridge = next(p["pid"] for p in report["processes"] if p["process"] == "bridge")
        os.kill(bridge, signal.SIGKILL)
        wait_for(lambda: _restarts(tuskline, "bridge") == 1, 60, "it is started again")

    with ThreadPoolExecutor(1) as pool:
        reporting = pool.submit(
            tuskline.json, "report", str(page), "--seconds", "20", "--every", "0.5"
        )
        kill_bridge()
        told = reporting.result(120)
    assert told["file"] == str(page)
    assert told["samples"] > 5
    assert told["problems"] > 0
    text = page.read_text()
    assert re.search(r"<title>bridge: down for [0-9.]+ s</title>", text)
    assert "<title>log-server</title>" in text
    assert "capture: from the WAL into the log" in text
    gone = tuskline.run("report", str(tmp_path / "none" / "page.html"), "--seconds", "1")
    assert gone.returncode == Cause.USAGE
    assert "in a folder that exists" in gone.stderr


def test_a_part_that_dies_is_told_and_comes_back(tuskline: Attached, shop: Database) -> None:
    tuskline.up()
    wait_for(lambda: is_healthy(tuskline), 60, "everything runs")
    wait_for(lambda: fetch(tuskline, "/readyz")[0] == 200, 30, "ready")
    report = tuskline.json("status")
    bridge = next(p["pid"] for p in report["processes"] if p["process"] == "bridge")
    os.kill(bridge, signal.SIGSTOP)
    try:
        # A bridge that hangs: the log does not answer.
        code, text = wait_for(lambda: _unready(tuskline), 30, "not ready")
        assert code == 503
        assert any("log" in reason for reason in json.loads(text)["reasons"])
        assert fetch(tuskline, "/healthz")[0] == 200
    finally:
        os.kill(bridge, signal.SIGKILL)
    # Until the supervisor has noticed, the status files of the dead are fresh, and all seems well.
    wait_for(lambda: _restarts(tuskline, "bridge") == 1, 60, "it is started again")
    wait_for(lambda: is_healthy(tuskline), 60, "everything runs again")
    assert _restarts(tuskline, "bridge") == 1
    shop.execute("INSERT INTO orders VALUES (1, 'x')")
    committed(tuskline, shop)
    # `up` itself: its children go with it, and nobody is taken for it.
    assert tuskline.process is not None
    family = processes.family(tuskline.process.pid)
    tuskline.kill_up()
    wait_for(lambda: not any(map(processes.alive, family)), 20, "its children ended with it")
    assert pid_file.owner(tuskline.run_dir) is None
    assert tuskline.json("down")["ended"] is None
    report = tuskline.json("status", code=Cause.UNAVAILABLE)
    assert "process bridge is gone" in report["problems"]
    tuskline.up()
    wait_for(lambda: is_healthy(tuskline), 60, "everything runs once more")


@pytest.mark.long
def test_a_log_of_an_older_copy_is_told_and_begun_again(
    tuskline: Attached, shop: Database, tmp_path: Path
) -> None:
    tuskline.json("init")
    tuskline.up()
    wait_for(lambda: is_healthy(tuskline), 60, "everything runs")
    committed(tuskline, shop)
    log, log_server, old = tmp_path / "log", tmp_path / "log-server", tmp_path / "old"
    old.mkdir()
    for file in log.glob("repository.sqlite*"):
        shutil.copy(file, old)
    committed(tuskline, shop)
    assert tuskline.process is not None
    family = processes.family(tuskline.process.pid)
    tuskline.kill_up()
    wait_for(lambda: not any(map(processes.alive, family)), 20, "its children ended with it")
    for file in log.glob("repository.sqlite*"):
        file.unlink()
    for file in old.iterdir():
        shutil.move(file, log)
    tuskline.up()
    wait_for(lambda: any("was never issued" in word for word in ill(tuskline)), 60, "the reason")
    assert tuskline.json("status", code=Cause.UNAVAILABLE)["healthy"] is False
    found = tuskline.json("doctor", code=Cause.DIVERGED)["findings"]
    assert any("was never issued" in f["what"] and "log-lost.md" in f["repair"] for f in found)
    _, text = wait_for(lambda: _unready(tuskline), 30, "not ready")
    assert "was never issued" in text
    # The way out of docs/log-lost.md.
    tuskline.stop_up()
    for file in (
        *log.glob("repository.sqlite*"),
        log_server / "log-server.json",
        log_server / "streams",
    ):
        shutil.move(file, old)
    drop_slot(shop, "tuskline_shop")
    tuskline.json("init")
    tuskline.up()
    wait_for(lambda: is_healthy(tuskline), 60, "everything runs again")
    committed(tuskline, shop)


def _unready(tuskline: Attached) -> tuple[int, str] | None:
    answer = fetch(tuskline, "/readyz")
    return answer if answer[0] == 503 else None


def test_in_the_background_with_logs_in_json(tuskline: Attached, shop: Database) -> None:
    env = {"TUSKLINE_LOGS__FORMAT": "json"}
    # As a power cut leaves files that were not synced.
    tuskline.run_dir.parent.mkdir(mode=0o700)
    tuskline.run_dir.mkdir()
    for name in ("up", "log-server", "bridge", "capture-shop.status"):
        (tuskline.run_dir / f"{name}.json").touch()
    assert tuskline.json("status", code=Cause.UNAVAILABLE)["processes"] == []
    done = tuskline.run("up", "--background", env=env)
    assert done.returncode == 0, done.stderr
    try:
        wait_for(lambda: is_healthy(tuskline), 60, "everything runs")
        log = tuskline.directory / "log" / "logs" / "up.log"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        streaming = next(line for line in lines if line["event"] == "streaming")
        assert streaming["source"] == "shop"
        assert streaming["slot"] == "tuskline_shop"
        assert streaming["term"] >= 1
        assert re.fullmatch(r"[0-9A-F]+/[0-9A-F]+", streaming["lsn"])
        # A second one says why not, and changes nothing.
        done = tuskline.run("up", "--background", env=env)
        assert done.returncode == Cause.RUNNING
    finally:
        assert tuskline.json("down")["ended"]


def test_up_does_not_start_what_cannot_work(tuskline: Attached, shop: Database) -> None:
    shop.execute("CREATE TABLE bare (id int)")
    done = tuskline.run("--set", 'source.shop.tables=["public.bare"]', "up")
    assert done.returncode == Cause.PUBLICATION
    assert "REPLICA IDENTITY FULL" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_that_is_away_does_not_keep_up_from_starting(
    tmp_path: Path, make_server: MakeServer
) -> None:
    server = make_server(fsync="off")
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        make_tables(connection)
    source = {"dsn": server.dsn(), "tables": ["public.orders"]}
    with Attached(tmp_path, {"shop": source}) as tuskline:
        tuskline.json("init")
        server.stop()
        tuskline.up()
        wait_for(lambda: any("capture of shop" in word for word in ill(tuskline)), 30, "it says so")
        wait_for(lambda: "refused" in tuskline.run("status").stderr, 30, "and why")
        server.start()
        wait_for(lambda: is_healthy(tuskline), 60, "everything runs")
        assert tuskline.stop_up() == 0


def test_top_shows_it(tuskline: Attached, shop: Database) -> None:
    tuskline.up()
    wait_for(lambda: is_healthy(tuskline), 60, "everything runs")
    shop.execute("INSERT INTO orders VALUES (1, 'x')")
    committed(tuskline, shop)

    async def look() -> list[str]:
        app = Top(load_config(tuskline.config), every=0.2)
        async with app.run_test(size=(140, 50)) as pilot:
            seen: list[str] = []
            for _ in range(150):
                await pilot.pause(0.1)
                seen = str(app.query_one("#seen", Static).content).splitlines()
                if any(line.startswith("shop ") and " streaming " in line for line in seen):
                    break
            await pilot.press("q")
        assert app.return_code == 0
        return seen

    seen = asyncio.run(look())
    # No lake is configured, so neither epochs nor a merge are spoken of.
    assert re.fullmatch(r"version \d+", seen[0])
    assert any(
        re.match(r"source +state +capture +gate +barrier +slot holds", line) for line in seen
    )
    assert any(line.startswith("shop ") and " streaming " in line for line in seen)
    for name in ("up", "bridge", "log-server/replicas"):
        assert any(re.match(rf"{name} +running ", line) for line in seen)


def test_a_role_that_sees_little_is_enough_to_look(tmp_path: Path, shop: Database) -> None:
    """No pg_monitor, no superuser: what may not be seen is unknown, not an error."""
    role = f"plain_{shop.name}"
    dsn = shop.server.dsn(shop.name, user=role, password=SECRET)
    tables = ["public.orders", "public.audit"]
    with Attached(tmp_path, {"shop": {"dsn": dsn, "tables": tables}}) as tuskline:
        password = psycopg.conninfo.conninfo_to_dict(shop.dsn)["password"]
        admin = ("--admin", "user=postgres")
        env = {"PGPASSWORD": str(password)}
        tuskline.json("init", *admin, env=env)
        tuskline.up()
        wait_for(lambda: is_healthy(tuskline), 60, "everything runs")
        assert tuskline.json("lag")["sources"][0]["bytes"] is not None
        assert tuskline.stop_up() == 0
        tuskline.json("detach", *admin, env=env)
