"""The C extension, built for the servers that are here and given to them without writing into their folders.

Built for each `pg_config` that has the server's headers: those of `TUSKLINE_PG_CONFIG` (a colon between them), then
the one beside the server's programs. 18 finds the extension where `extension_control_path` says, so `CREATE
EXTENSION` itself is run there; before 18 that looks in the server's own folder only, so the script is run as
`CREATE EXTENSION` would, with the library's path in it.
"""

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.servers import DEFAULT, majors
from walsender_bridge.demo.local_server import LocalServer, by_major

ROOT = Path(__file__).resolve().parent.parent.parent
SCHEMA = "tuskline_slots"
SCRIPT = ROOT / "sql" / "extension" / "tuskline--0.2.sql"
#: From this major on an extension need not lie in the server's folder.
CONTROL_PATH = 18


def _answer(pg_config: Path, question: str) -> str:
    done = subprocess.run([pg_config, question], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


@cache
def pg_config(major: int) -> Path | None:
    """The `pg_config` to build with for the server of `major` that tests use, if its headers are here."""
    candidates = [
        Path(each) for each in os.environ.get("TUSKLINE_PG_CONFIG", "").split(":") if each
    ]
    if major in by_major():
        candidates.append(by_major()[major].bin_dir / "pg_config")
    for each in candidates:
        if each.exists() and _answer(each, "--version").startswith(f"PostgreSQL {major}."):
            headers = Path(_answer(each, "--includedir-server"))
            if (headers / "replication" / "slot.h").exists():
                return each
    return None


def buildable() -> list[int]:
    """The majors whose server and headers are both here, and a compiler with them."""
    if not (shutil.which("gcc") and shutil.which("make")):
        return []
    return [major for major in majors() if pg_config(major)]


def _parameters(*in_each_run: int) -> list[Any]:
    """The majors of a test: these in `make test`, the others in `make test-all`."""
    return [
        pytest.param(
            major, marks=[] if major in in_each_run else [pytest.mark.long], id=f"pg{major}"
        )
        for major in buildable()
    ]


MAJORS = _parameters(DEFAULT, CONTROL_PATH)
#: For a test that takes its time.
ONE = _parameters(DEFAULT)


@cache
def build(major: int, *, fail_points: bool = False) -> Path:
    """A folder with the library, its script and its control file, for as long as this process runs."""
    folder = Path(tempfile.mkdtemp(prefix="tuskline-extension-"))
    _built.append(folder)
    folder.chmod(0o755)
    found = pg_config(major)
    assert found is not None, f"the headers of PostgreSQL {major} are not here"
    command = ["make", "-s", "-C", str(folder), "-f", str(ROOT / "extension" / "Makefile")]
    done = subprocess.run(
        [*command, f"PG_CONFIG={found}", *(["FAIL_POINTS=1"] if fail_points else [])],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    (folder / "extension").mkdir()
    for path in (*SCRIPT.parent.glob("*.sql"), ROOT / "extension" / "tuskline.control"):
        shutil.copy(path, folder / "extension")
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() or path.suffix == ".so" else 0o644)
    return folder


@cache
def _catalog_reader(major: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tuskline-plugin-"))
    _built.append(folder)
    folder.chmod(0o755)
    makefile = ROOT / "tests" / "support" / "catalog_reader" / "Makefile"
    command = ["make", "-s", "-C", str(folder), "-f", str(makefile)]
    done = subprocess.run(
        [*command, f"PG_CONFIG={pg_config(major)}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (folder / "catalog_reader.so").chmod(0o755)
    return folder


def catalog_reader(major: int) -> dict[str, str]:
    """The settings with which a server of `running_pair` finds the output plugin `catalog_reader`."""
    path = f"$libdir:{build(major)}:{_catalog_reader(major)}"
    found = {"dynamic_library_path": path}
    if lists_plugins(major):
        found["output_plugin_libraries"] = "pgoutput, catalog_reader"
    return found


_built: list[Path] = []


def remove_built() -> None:
    """Remove what `build` made."""
    build.cache_clear()
    _catalog_reader.cache_clear()
    while _built:
        shutil.rmtree(_built.pop(), ignore_errors=True)


def settings(major: int, library: Path) -> dict[str, str]:
    """What a server's configuration needs to find the extension in `library`."""
    if major < CONTROL_PATH:
        return {}
    return {
        "extension_control_path": f"$system:{library}",
        "dynamic_library_path": f"$libdir:{library}",
    }


@cache
def lists_plugins(major: int) -> bool:
    """Whether plugins have to be named to the server (`output_plugin_libraries`, since the minors of November 2026)."""
    postgres = by_major()[major].bin_dir / "postgres"
    done = subprocess.run([postgres, "--describe-config"], capture_output=True, check=False)
    return b"output_plugin_libraries" in done.stdout


def plugin_settings(major: int, library: Path) -> dict[str, str]:
    """What a server needs to take the output plugin from `library`, where 18 finds the extension too."""
    found = settings(major, library) or {"dynamic_library_path": f"$libdir:{library}"}
    if lists_plugins(major):
        found["output_plugin_libraries"] = "pgoutput, test_decoding, tuskline"
    return found


def create_extension(server: LocalServer, library: Path, dbname: str = "postgres") -> None:
    """`CREATE EXTENSION tuskline` in a database, or before 18 what that does."""
    with psycopg.connect(server.dsn(dbname), autocommit=True) as connection:
        if server.installation.major >= CONTROL_PATH:
            connection.execute("CREATE EXTENSION tuskline")
            return
        script = SCRIPT.read_text().replace("@extschema@", SCHEMA)
        script = script.replace("MODULE_PATHNAME", str(library / "tuskline"))
        lines = [line for line in script.splitlines() if not line.startswith("\\echo")]
        connection.execute(f"CREATE SCHEMA {SCHEMA}".encode())
        connection.execute("\n".join(lines).encode())
