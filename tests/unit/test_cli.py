"""Exit codes by cause, JSON on stdout's last line, errors with a repair."""

import inspect
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import tuskline
from walsender_bridge.cli import app as cli
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import Cause


def _run(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "walsender_bridge.cli.app", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
    )


@pytest.mark.parametrize(
    "command",
    [["log-server", "run"], ["bridge", "run"], ["lake", "run"], ["flush"], ["log", "status"]],
)
def test_no_configuration_is_its_own_exit_code(tmp_path, command):
    done = _run(*command, cwd=tmp_path)
    assert done.returncode == Cause.CONFIG
    assert "tuskline.toml" in done.stderr
    assert "\nHINT:  name the file with --config" in done.stderr
    assert "Traceback" not in done.stderr


def test_errors_as_json(tmp_path):
    done = _run("flush", "--json", cwd=tmp_path)
    assert done.returncode == Cause.CONFIG
    assert json.loads(done.stderr)["error"]["code"] == "CONFIG"
    assert done.stdout == ""


def test_a_demo_of_both_failovers_is_refused_with_the_reason(tmp_path):
    done = _run("demo", "--standby", "--safekeepers", "3", "--json", cwd=tmp_path)
    assert done.returncode == Cause.USAGE
    error = json.loads(done.stderr)["error"]
    assert "without a failover by the safekeepers" in error["what"]
    assert "docs/failover.md" in error["repair"]


def test_a_lake_command_without_a_lake(tmp_path):
    (tmp_path / "tuskline.toml").write_text(
        '[log]\ndata_dir = "log"\n[[log_server]]\nlisten = "127.0.0.1:1"\ndata_dir = "k"\n'
        '[[source]]\nname = "s"\ndsn = ""\n'
    )
    done = _run("epochs", "list", cwd=tmp_path)
    assert done.returncode == Cause.LAKE
    assert "[lake]" in done.stderr


def test_help_needs_no_spark(tmp_path):
    done = _run("--help", cwd=tmp_path)
    assert done.returncode == 0
    for command in ("demo", "flush", "log-server", "bridge", "lake", "epochs", "log", "table"):
        assert command in done.stdout
    for command in ("init", "doctor", "up", "status", "lag", "top", "down", "detach", "metrics"):
        assert command in done.stdout


#: What takes longer to import than the command line itself, and nobody needs who asks for help.
HEAVY = {
    *("asyncio", "grpc", "http.server", "logging", "lmdb", "numpy", "prometheus_client"),
    *("psycopg", "pyarrow", "pydantic", "pydantic_settings", "pygments", "pyspark"),
    *("rich.console", "rich.progress", "sqlite3", "ssl", "structlog", "textual"),
}


def _imported(words, cwd):
    """The exit code of a command, and the modules that it has imported at its end."""
    script = (
        "import atexit, json, sys\n"
        "atexit.register(lambda: print(json.dumps([*sys.modules]), file=sys.stderr))\n"
        f"sys.argv = ['tuskline', *{words!r}]\n"
        "from walsender_bridge.cli.app import main\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        # What another test here has set for the processes that it starts.
        env={name: value for name, value in os.environ.items() if not name.startswith("TUSKLINE_")},
    )
    return done.returncode, set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_help_and_version_import_nothing_heavy(words, tmp_path):
    code, imported = _imported(words, tmp_path)
    assert code == 0
    assert "walsender_bridge.cli.status" in imported
    assert sorted(HEAVY & imported) == []


def test_h_is_help_and_the_version_is_the_package_s(tmp_path):
    assert _run("-h", cwd=tmp_path).stdout == _run("--help", cwd=tmp_path).stdout
    assert _run("--version", cwd=tmp_path).stdout == f"tuskline {tuskline.__version__}\n"


def test_help_takes_less_than_four_tenths_of_a_second(tmp_path):
    """Of processor time, the least of three: a machine that is busy shares its caches, too."""
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert _run("--help", cwd=tmp_path).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(taken) < 0.4, taken


def test_status_imports_no_client_of_a_log_that_does_not_run(tmp_path):
    (tmp_path / "tuskline.toml").write_text(
        f'[log]\ndata_dir = "log"\nlisten = "127.0.0.1:{free_port()}"\n'
        f'[lake]\nuri = "lake"\n[[log_server]]\nlisten = "127.0.0.1:{free_port()}"\ndata_dir = "k"\n'
        f'[[source]]\nname = "s"\ndsn = "host=127.0.0.1 port={free_port()}"\n'
    )
    code, imported = _imported(["status"], tmp_path)
    assert code == Cause.UNAVAILABLE
    assert "walsender_bridge.observability.observation" in imported
    # It connects to the sources: their client library, which has asyncio, and a checked configuration.
    needed = {"asyncio", "logging", "psycopg", "pydantic", "ssl"}
    assert sorted((HEAVY - needed) & imported) == []


def test_a_full_folder_is_not_used_by_the_demo(tmp_path):
    (tmp_path / "mine").write_text("precious")
    done = _run("demo", "--dir", str(tmp_path), cwd=tmp_path)
    assert done.returncode == Cause.LAKE
    assert "not empty" in done.stderr
    assert (tmp_path / "mine").read_text() == "precious"


def test_every_exit_code_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "exit-codes.md").read_text()
    for cause in Cause:
        assert f"| {cause.value} | `{cause.name}` | " in page


def _commands(command: Any, context: Any) -> Iterator[tuple[Any, str]]:
    """Each command, and its help as it is printed, on one line."""
    own = type(context)(command, parent=context, info_name=command.name)
    yield command, " ".join(command.get_help(own).split())
    for nested in getattr(command, "commands", {}).values():
        yield from _commands(nested, own)


def _written(command: Any) -> Iterator[str]:
    """What the source says of a command and of its options."""
    # Typer wraps the function; a group's callback, which has no text, leaves the group's own.
    text = inspect.getdoc(command.callback) if command.callback is not None else None
    yield text or command.help or ""
    for option in command.params:
        yield getattr(option, "help", None) or ""


def test_help_shows_every_docstring_whole(monkeypatch):
    """Brackets among it, `[metrics]`: they are sections of the configuration, and no markup."""
    monkeypatch.setenv("COLUMNS", "1000")
    # Typer may bring a click of its own.
    command: Any = typer.main.get_command(cli.app)
    top = command.make_context("tuskline", [], resilient_parsing=True)
    seen = brackets = 0
    for each, shown in _commands(command, top):
        for text in _written(each):
            assert " ".join(text.split()) in shown
            seen += 1
            brackets += len(re.findall(r"\[[a-z.]+\]", text))
    assert seen > 100
    assert brackets > 0


def test_help_describes_every_parameter_and_brackets_it_once():
    command: Any = typer.main.get_command(cli.app)
    top = command.make_context("tuskline", [], resilient_parsing=True)
    for each, shown in _commands(command, top):
        assert all(getattr(parameter, "help", None) for parameter in each.params), each.name
        usage = shown.partition("Arguments:")[0].partition("Options:")[0]
        assert not re.search(r"\[\[|\.\.\.\}", usage), usage
