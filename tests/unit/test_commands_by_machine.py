"""Each command on each kind of machine: allowed, or refused by name, with where to run it."""

from pathlib import Path

import pytest
import typer

from tests.support.machine_files import KINDS, machine
from walsender_bridge.capture import publication
from walsender_bridge.cli import app as cli
from walsender_bridge.cli import flush
from walsender_bridge.config import SourceSection
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import ConfigError, TusklineError, UnavailableError
from walsender_bridge.runtime import logs, supervisor

COMMAND_LINE = typer.main.get_command(cli.app)
SOURCE = '[[source]]\nname = "shop"\ndsn = "dbname=shop"\n'
NOWHERE = SOURCE.replace("dbname", "host=/nowhere dbname")
#: Where each command may be run, with what it needs to get past the command line.
ALLOWED: dict[str, set[str]] = {
    # Of one part.
    "log-server run": {"log-server", "safekeepers"},
    "bridge run": {"bridge", "repository"},
    "lake run": {"lake"},
    "lake maintain --once --timeout 0": {"lake"},
    "slots sync --once --timeout 0": {"slots"},
    "slots status": {"slots"},
    "slots ready --standby near": {"slots"},
    "log backup FILE": {"repository"},
    "log rebuild --dry-run": {"repository"},
    # What the bridge has at the server: its role, publication, slots, and what COMMIT waits for.
    "init": {"bridge"},
    "detach": {"bridge"},
    "reattach shop": {"bridge"},
    "quorum show": {"bridge"},
    "quorum require": {"bridge"},
    "quorum release --yes --yes-i-may-lose-data": {"bridge"},
    "quorum forget --yes --yes-i-may-lose-data": {"bridge"},
    "wait --quorum --timeout 0": {"bridge"},
    "safekeeper add 127.0.0.1:7411 --timeout 0": {"bridge"},
    "safekeeper remove 127.0.0.1:7411 --timeout 0": {"bridge"},
    "safekeeper replace 127.0.0.1:7411 127.0.0.1:7412 --timeout 0": {"bridge"},
    "safekeeper status": {"bridge", "safekeepers"},
    # Each does its own: the sources, or the lake.
    "reattach": {"bridge", "lake"},
    # Of the lake, where it is known.
    "flush --timeout 0": {"lake"},
    "sync --timeout 0": {"lake"},
    "verify": {"lake"},
    "lake verify": {"lake"},
    "epochs list": {"lake"},
    "epochs show 1": {"lake"},
    "epochs pin release": {"lake"},
    "epochs unpin release": {"lake"},
    "view list": {"lake"},
    "view explain revenue": {"lake"},
    "table list": {"lake"},
    "table add shop.public.t": {"lake"},
    "table pause shop.public.t": {"lake"},
    "table resume shop.public.t": {"lake"},
    "table resync shop.public.t": {"lake"},
    "table drop shop.public.t": {"lake"},
    "quarantine list": {"lake"},
    "quarantine retry shop.public.t": {"lake"},
    "quarantine skip shop.public.t --all": {"lake"},
}
#: Which of these run until a signal: only where they are refused.
ENDLESS = {"log-server run", "bridge run", "lake run"}
#: Of a machine whatever its kind, or clients of the log, whose address they name if it does not answer.
ANYWHERE = {
    "up",
    "down",
    "status",
    "lag",
    "top",
    "doctor",
    "metrics",
    "report",
    "log status",
    "log verify",
    "log tail",
    "log trim",
    "safekeeper verify",
    "certs init",
    "certs issue",
    "certs names",
    "demo",
}


@pytest.fixture(autouse=True)
def _no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is a part would change this process."""
    monkeypatch.setattr(supervisor, "exit_with_parent", lambda: None)
    monkeypatch.setattr(logs, "begin_part", lambda: None)


def written(folder: Path, *kinds: str) -> Path:
    """The file of a machine of this kind; no server it names answers."""
    text = machine(*kinds).replace('"dbname=shop"', '"host=/nowhere dbname=shop"')
    text = text.replace('"host=near"', '"host=/nowhere"')
    path = folder / "tuskline.toml"
    path.write_text(
        text if "[log]" in text else f'{text}[log]\nlisten = "127.0.0.1:{free_port()}"\n'
    )
    return path


def error_of(command: str, file: Path) -> Exception | None:
    arguments = [str(file.parent / each) if each == "FILE" else each for each in command.split()]
    try:
        COMMAND_LINE.main([*arguments, "--config", str(file)], standalone_mode=False)
    except Exception as error:
        return error
    return None


def is_refused(error: Exception | None) -> bool:
    return isinstance(error, ConfigError) and "on another machine" in error.what


@pytest.mark.parametrize("kind", KINDS)
def test_each_command_is_of_this_machine_or_names_the_other(tmp_path: Path, kind: str) -> None:
    wrong = {}
    for command, kinds in ALLOWED.items():
        if kind in kinds and command in ENDLESS:
            continue
        error = error_of(command, written(tmp_path, kind))
        if kind in kinds:
            # It fails, if at all, at what it asks and nobody answers.
            known = error is None or isinstance(error, TusklineError)
            if not known or is_refused(error):
                wrong[command] = error
        elif not is_refused(error) or "run the command there" not in getattr(error, "repair", ""):
            wrong[command] = error
    assert wrong == {}


@pytest.mark.parametrize("kind", ["log-server", "safekeepers", "slots"])
@pytest.mark.parametrize("command", ["status", "verify", "tail shop", "trim shop"])
def test_a_command_of_the_log_says_that_the_file_names_none(
    tmp_path: Path, kind: str, command: str
) -> None:
    """It asked for the default address, where nothing is on such a machine."""
    file = written(tmp_path, kind)
    assert isinstance(error_of(f"log {command}", file), UnavailableError), "it names one"
    file.write_text(machine(kind))
    error = error_of(f"log {command}", file)
    assert isinstance(error, ConfigError)
    assert "names no repository" in error.what
    assert error.where == str(file)


def test_a_hint_names_all_parts_that_would_do(tmp_path: Path) -> None:
    error = error_of("reattach", written(tmp_path, "log-server"))
    assert isinstance(error, ConfigError)
    assert 'add "bridge" or "lake" to' in error.repair
    error = error_of("slots status", written(tmp_path, "log-server"))
    assert isinstance(error, ConfigError)
    assert error.what == (
        "the slots of this configuration are on another machine, or there are none: there is no [slots]"
    )


def test_the_table_has_every_command() -> None:
    found: set[str] = set()

    def walk(command: object, name: str) -> None:
        for each, child in getattr(command, "commands", {}).items():
            walk(child, f"{name} {each}".strip())
        if not hasattr(command, "commands"):
            found.add(name)

    walk(COMMAND_LINE, "")
    named = {each for each in found if any(f"{known} ".startswith(f"{each} ") for known in ALLOWED)}
    assert found - named == ANYWHERE


def test_a_flush_where_only_the_lake_is_leaves_the_publication_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The `tables` of its file may be others than the bridge's, whose the publication is."""
    asked: list[str] = []

    def publish(section: SourceSection, _: float) -> tuple[str, ...]:
        asked.append(section.name)
        return ()

    monkeypatch.setattr(flush, "publish_new", publish)
    monkeypatch.setattr(publication, "follow", lambda *_: pytest.fail("the publication changed"))
    for kinds, seen in ((("lake",), []), (("bridge", "lake"), ["shop"])):
        text = machine(*kinds)
        if len(kinds) > 1:
            text = text.replace(SOURCE, "", 1)
        (tmp_path / "tuskline.toml").write_text(text.replace(SOURCE, NOWHERE))
        error_of("flush --timeout 0", tmp_path / "tuskline.toml")
        assert asked == seen
