"""The lowest versions that pyproject.toml allows work: each command prints its help with them.

A bound that nothing tests is a promise about versions that nobody has run. `long`: the packages are fetched.
"""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Asks every command for its help, in a process that has only what was installed.
_HELP = """
from walsender_bridge.cli.app import app
import typer

def walk(command, parent):
    context = type(parent)(command, parent=parent, info_name=command.name)
    assert command.get_help(context), command.name
    found = [*getattr(command, "commands", {}).values()]
    return 1 + sum(walk(each, context) for each in found)

root = typer.main.get_command(app)
print(walk(root, root.make_context("tuskline", [], resilient_parsing=True)))
"""
#: What runs at the bounds: the parts that lean most on a library, and need no server and no Spark.
_TESTS = ("test_cli", "test_config", "test_log_store", "test_repository_store", "test_slots_view")
#: What the tests themselves are run with: the version that runs this one.
_TOOLS = ("hypothesis", "pytest", "pytest-timeout", "testcontainers")


@pytest.fixture(scope="module")
def lowest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with each direct dependency at its lower bound."""
    place = tmp_path_factory.mktemp("lowest") / "venv"
    uv = str(Path(sys.executable).with_name("uv"))
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, place], check=True)
    python = place / "bin" / "python"
    install = [uv, "pip", "install", "--quiet", "--python", str(python)]
    lowest = ["--resolution", "lowest-direct", f"{ROOT}[local]"]
    subprocess.run([*install, *lowest], check=True, timeout=900)
    tools = [f"{name}=={metadata.version(name)}" for name in _TOOLS]
    subprocess.run([*install, *tools], check=True, timeout=900)
    return python


def _run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    return subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=800, cwd=cwd, env=clean
    )


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_command_prints_its_help_at_the_lower_bounds(lowest: Path, tmp_path: Path) -> None:
    done = _run(lowest, "-c", _HELP, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 20


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_what_leans_on_libraries_passes_at_the_lower_bounds(lowest: Path) -> None:
    files = [f"tests/unit/{name}.py" for name in _TESTS]
    # An old version may use what the newest one of another library has deprecated.
    plain = ("-p", "no:cacheprovider", "-q", "-m", "not long", "-W", "default::DeprecationWarning")
    # Typer's oldest version brings rich for every command.
    done = _run(
        lowest,
        "-m",
        "pytest",
        *plain,
        "-k",
        "not nothing_heavy and not imports_no_client",
        *files,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-3000:]
