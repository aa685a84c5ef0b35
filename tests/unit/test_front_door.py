"""`import tuskline`: its names, what importing it costs, and what a machine without an extra says."""

import subprocess
import sys
from importlib import metadata

import pytest

import tuskline
import walsender_bridge.errors
from tuskline import errors

#: What importing the package, or a name that does not need it, is not to import.
COSTLY = ("numpy", "psycopg", "py4j", "pyarrow", "pydantic", "pyspark", "structlog", "typer")


def run(code: str, *, without: tuple[str, ...] = ()) -> str:
    """What a new process prints, in which these modules cannot be found."""
    hidden = f"import sys\nfor name in {without!r}: sys.modules[name] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", hidden + code], cwd="/", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_no_library() -> None:
    code = "import sys, tuskline, tuskline.errors\nprint(*sys.modules)"
    assert not set(COSTLY) & set(run(code).split())


def test_every_name_is_there_and_is_listed() -> None:
    for name in tuskline.__all__:
        assert getattr(tuskline, name) is not None
        assert name in dir(tuskline)
    # Type checkers see a name only where it is imported for them.
    assert run("from tuskline import *\nprint(session.__name__, read.__name__)") == "session read\n"


def test_a_name_is_the_object_of_its_own_module() -> None:
    from spark_consumers.lake.reader import read
    from walsender_bridge.change_log.client import LogClient

    assert tuskline.read is read
    assert tuskline.LogClient is LogClient
    assert "read" in vars(tuskline)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(tuskline, "Session")
    with pytest.raises(ImportError, match="cannot import name 'Session'"):
        from tuskline import Session  # type: ignore[attr-defined]  # noqa: F401


def test_the_version_is_that_of_the_installed_package() -> None:
    assert tuskline.__version__ == metadata.version("tuskline")


def test_all_errors_are_public() -> None:
    classes = {
        name
        for name, each in vars(walsender_bridge.errors).items()
        if isinstance(each, type) and each.__module__ == walsender_bridge.errors.__name__
    }
    assert set(errors.__all__) == classes


@pytest.mark.parametrize("name", ["Lakehouse", "catalog_settings", "session", "settings"])
def test_a_name_without_its_extra_is_one_error_with_its_hint(name: str) -> None:
    code = f"""
from tuskline import errors
try:
    from tuskline import {name}
except errors.NotSupportedError as error:
    print(error)
"""
    said = run(code, without=("py4j", "pyspark"))
    assert said.splitlines() == [
        "this machine, for the extra spark: pyspark is not installed",
        "HINT:  pip install 'tuskline[spark]'",
    ]


def test_the_other_names_need_no_extra() -> None:
    needy = {"Lakehouse", "catalog_settings", "session", "settings"}
    names = ", ".join(sorted(set(tuskline.__all__) - needy))
    run(f"from tuskline import {names}", without=("lmdb", "py4j", "pyspark", "textual"))
