"""`tuskline` on somebody's own server, as a user runs it: a configuration, commands, `up` as a process."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg

from tests.support import table_format
from tests.support.child import run_tuskline, start_tuskline
from tests.support.servers import DEFAULT
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import by_major, free_port
from walsender_bridge.runtime import pid_file

CLI = (sys.executable, "-m", "walsender_bridge.cli.app")


def toml(value: object) -> str:
    """A string, number or list as TOML writes it; JSON's forms of these are TOML's."""
    return json.dumps(value)


class Attached:
    """One configuration in `directory`. `sources`: name to the section's keys (`dsn`, `tables`, ...)."""

    def __init__(
        self,
        directory: Path,
        sources: Mapping[str, Mapping[str, object]],
        *,
        lake: bool = False,
        metrics: bool = False,
        epoch_interval: float = 1.0,
        safekeepers: Mapping[str, object] | None = None,
    ) -> None:
        self.directory = directory
        self.config = directory / "tuskline.toml"
        self.sources = {name: dict(section) for name, section in sources.items()}
        self.log_listen = f"127.0.0.1:{free_port()}"
        self.metrics_listen = f"127.0.0.1:{free_port()}"
        self.lake = directory / "lake"
        self.output = directory / "up.log"
        self.process: subprocess.Popen[bytes] | None = None
        lines = ["[log]", 'data_dir = "log"', f'listen = "{self.log_listen}"']
        lines += [
            "[[log_server]]",
            'data_dir = "log-server"',
            f'listen = "127.0.0.1:{free_port()}"',
        ]
        if lake:
            lines += ["[lake]", 'uri = "lake"', f"epoch_interval = {epoch_interval}"]
            lines += table_format.section().splitlines()
        if metrics:
            lines += ["[metrics]", f'listen = "{self.metrics_listen}"']
        if safekeepers is not None:
            lines += ["[safekeepers]", *(f"{k} = {toml(v)}" for k, v in safekeepers.items())]
        for name, section in self.sources.items():
            lines += ["[[source]]", f"name = {toml(name)}"]
            lines += [f"{key} = {toml(value)}" for key, value in section.items()]
        self.config.write_text("\n".join(lines) + "\n")

    @property
    def run_dir(self) -> Path:
        return self.directory / "log" / "run"

    def run(
        self, *arguments: str, env: Mapping[str, str] | None = None, seconds: float = 90.0
    ) -> subprocess.CompletedProcess[str]:
        """Run `tuskline ARGUMENTS --config ...`."""
        told = [*arguments, "--config", str(self.config)]
        return run_tuskline(told, env=env or {}, seconds=seconds)

    def json(self, *arguments: str, code: int = 0, env: Mapping[str, str] | None = None) -> Any:
        """The result of `tuskline ARGUMENTS --json`, which must end with `code`."""
        done = self.run(*arguments, "--json", env=env)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return json.loads(done.stdout.splitlines()[-1])

    def error(self, *arguments: str, code: int, env: Mapping[str, str] | None = None) -> Any:
        """The error of `tuskline ARGUMENTS --json`, which must end with `code`."""
        done = self.run(*arguments, "--json", env=env)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return json.loads(done.stderr.splitlines()[-1])["error"]

    def error_plain(self, *arguments: str, code: int) -> str:
        """What `tuskline ARGUMENTS`, which must end with `code`, says for people."""
        done = self.run(*arguments)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done.stderr

    def up(self, env: Mapping[str, str] | None = None) -> None:
        """Start `tuskline up` in the foreground of a process of its own."""
        told = ["up", "--config", str(self.config)]
        self.process = start_tuskline(told, log=self.output, env=env)
        started = self.process

        def is_up() -> bool:
            assert started.poll() is None, self.logs()
            return pid_file.owner(self.run_dir) == started.pid

        wait_for(is_up, 30, "up holds its lock")

    def kill_up(self) -> None:
        """SIGKILL `up`, and wait for its end."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def stop_up(self, seconds: float = 60.0) -> int:
        """SIGTERM `up`; its exit code."""
        assert self.process is not None
        process, self.process = self.process, None
        process.send_signal(signal.SIGTERM)
        return process.wait(seconds)

    def logs(self, lines: int = 60) -> str:
        """The end of what `up` and its parts said, for a failure's message."""
        if not self.output.exists():
            return ""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            try:
                self.stop_up()
            except subprocess.TimeoutExpired:
                self.kill_up()
        if error is not None:
            print(self.logs())


def run_script(dsn: str, script: str) -> None:
    """What a DBA does with the script: psql, which stops at the first error."""
    # Not the server's own: a bare installation has none.
    done = subprocess.run(
        [by_major()[DEFAULT].tool("psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", dsn],
        input=script,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr


#: What a server has besides its tables' rows: everything that an attachment could leave behind.
STATE: Mapping[str, str] = {
    "slots": "SELECT slot_name, plugin, slot_type, database FROM pg_replication_slots",
    "publications": "SELECT to_jsonb(p) - 'oid' FROM pg_publication AS p",
    "published": "SELECT pubname, schemaname, tablename FROM pg_publication_tables",
    "roles": "SELECT to_jsonb(r) - 'oid' FROM pg_roles AS r",
    "memberships": "SELECT roleid::regrole::text, member::regrole::text FROM pg_auth_members",
    "settings": "SELECT name, setting, source FROM pg_settings WHERE name NOT LIKE 'application_name'",
    "role settings": "SELECT setdatabase, setrole, setconfig FROM pg_db_role_setting",
    "schemas": "SELECT nspname, nspowner::regrole::text FROM pg_namespace"
    " WHERE nspname NOT LIKE 'pg_toast_temp%' AND nspname NOT LIKE 'pg_temp%'",
    "relations": "SELECT c.oid::regclass::text, c.relkind, c.relreplident, c.relowner::regrole::text"
    " FROM pg_class AS c WHERE c.oid >= 16384",
    "table privileges": "SELECT c.oid::regclass::text, x.grantee, x.privilege_type FROM pg_class AS c,"
    " aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) AS x WHERE c.oid >= 16384",
    "schema privileges": "SELECT n.nspname, x.grantee, x.privilege_type FROM pg_namespace AS n,"
    " aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) AS x",
    "database privileges": "SELECT d.datname, x.grantee, x.privilege_type FROM pg_database AS d,"
    " aclexplode(coalesce(d.datacl, acldefault('d', d.datdba))) AS x",
    "extensions": "SELECT extname FROM pg_extension",
    "triggers": "SELECT tgname, tgrelid::regclass::text FROM pg_trigger",
    "event triggers": "SELECT evtname FROM pg_event_trigger",
    "functions": "SELECT oid::regprocedure::text FROM pg_proc WHERE oid >= 16384",
}


def server_state(dsn: str) -> dict[str, list[str]]:
    """What the server has, by kind, as comparable texts."""
    with psycopg.connect(dsn, autocommit=True, client_encoding="utf8") as connection:
        return {
            kind: sorted(str(row) for row in connection.execute(query.encode()).fetchall())
            for kind, query in STATE.items()
        }


def difference(before: Mapping[str, list[str]], after: Mapping[str, list[str]]) -> list[str]:
    """The lines by which two states differ, with - and + like a diff's."""
    found = []
    for kind in before:
        found += [f"- {kind}: {line}" for line in before[kind] if line not in after[kind]]
        found += [f"+ {kind}: {line}" for line in after[kind] if line not in before[kind]]
    return found
