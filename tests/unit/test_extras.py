"""A machine without an extra: one sentence with the command that installs it, before anything starts."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.parts_config import configuration
from walsender_bridge.cli.app import app
from walsender_bridge.errors import NotSupportedError
from walsender_bridge.runtime.extras import MODULES


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return configuration(tmp_path, lake=True)


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        (["log-server", "run"], "lmdb", "log-server"),
        (["lake", "run"], "pyspark", "spark"),
        (["metrics"], "prometheus_client", "monitor"),
        (["top"], "textual", "monitor"),
        (["up"], "lmdb", "log-server"),
        (["up"], "pyspark", "spark"),
    ],
)
def test_a_missing_extra_is_one_sentence_and_nothing_starts(
    config: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    # Started by no supervisor: a parent's pipe would be closed here.
    monkeypatch.setattr("walsender_bridge.runtime.supervisor.exit_with_parent", lambda: None)
    result = CliRunner().invoke(app, [*command, "-c", str(config)])
    error = result.exception
    assert isinstance(error, NotSupportedError), result.output
    assert error.what == f"{module} is not installed"
    assert f"tuskline[{extra}]" in error.repair
    assert not (config.parent / "lake").exists()
    assert not (config.parent / "log-server").exists()


def test_what_is_looked_for_is_what_the_extras_install() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    for name, modules in MODULES.items():
        packages = {re.split("[<>=~]", each)[0].replace("-", "_") for each in extras[name]}
        assert set(modules) == packages
