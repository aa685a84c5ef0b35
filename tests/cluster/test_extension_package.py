"""The extension as it is delivered: pg_regress on each major, the ways between its versions, a Debian package of it."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.support import extension
from tests.support.extension import CONTROL_PATH, MAJORS, ROOT
from tests.support.servers import DEFAULT, MakeServer
from walsender_bridge.demo.local_server import LocalServer, by_major

SCRIPTS = ROOT / "sql" / "extension"
MAKEFILE = ROOT / "extension" / "Makefile"
TESTS = re.search(r"^REGRESS = (.*)$", MAKEFILE.read_text(), re.MULTILINE)[1].split()  # type: ignore[index]
NEWEST = [each for each in MAJORS if each.values[0] == CONTROL_PATH]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that the server's account can enter."""
    with tempfile.TemporaryDirectory(prefix="tuskline-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def server_with(make_server: MakeServer, major: int, folder: Path) -> LocalServer:
    """A server that finds the extension, or its library, in `folder`."""
    server = make_server(major, fsync="off", **extension.plugin_settings(major, folder))
    server.start()
    return server


def client_settings(server: LocalServer) -> dict[str, str]:
    """For programs that take what libpq does."""
    told = {name: str(value) for name, value in conninfo_to_dict(server.dsn()).items()}
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
        "PGHOST": told["host"],
        "PGPORT": told["port"],
        "PGUSER": told["user"],
        "PGPASSWORD": told["password"],
    }


def regress(server: LocalServer) -> list[str]:
    """The pg_regress of the default major, since not all that are packaged run here; psql is the server's own."""
    config = by_major()[DEFAULT].tool("pg_config")
    makefile = Path(subprocess.check_output([config, "--pgxs"], text=True).strip())
    program = makefile.parents[1] / "test" / "regress" / "pg_regress"
    return [
        *(str(program), f"--inputdir={MAKEFILE.parent}"),
        f"--bindir={server.installation.bin_dir}",
    ]


@pytest.mark.parametrize("major", MAJORS)
def test_10_pg_regress(make_server: MakeServer, major: int, tmp_path: Path) -> None:
    library = extension.build(major)
    server = server_with(make_server, major, library)
    extension.create_extension(server, library)
    done = subprocess.run(
        [
            *(*regress(server), f"--outputdir={tmp_path}", "--use-existing", "--dbname=postgres"),
            *("--host=127.0.0.1", f"--port={server.port}", "--user=postgres", *TESTS),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=client_settings(server),
    )
    differences = tmp_path / "regression.diffs"
    told = differences.read_text() if differences.exists() else ""
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{told}"


@pytest.mark.parametrize("major", NEWEST)
def test_10_make_installcheck(make_server: MakeServer, major: int) -> None:
    library = extension.build(major)
    server = server_with(make_server, major, library)
    command = ["make", "-C", str(library), "-f", str(MAKEFILE), "installcheck"]
    done = subprocess.run(
        [
            *(*command, f"PG_CONFIG={extension.pg_config(major)}"),
            f"pg_regress_installcheck={' '.join(regress(server))}",
        ],
        capture_output=True,
        text=True,
        check=False,
        env=client_settings(server),
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def default_version() -> str:
    control = (ROOT / "extension" / "tuskline.control").read_text()
    return re.search(r"^default_version = '(.*)'$", control, re.MULTILINE)[1]  # type: ignore[index]


def test_each_version_has_a_way_to_the_newest() -> None:
    """And the newest can be made at once, too: a fresh server runs one script and not the history."""
    named = [path.stem.removeprefix("tuskline--").split("--") for path in SCRIPTS.glob("*.sql")]
    whole = {parts[0] for parts in named if len(parts) == 1}
    steps = {(parts[0], parts[1]) for parts in named if len(parts) == 2}
    assert all(len(parts) in {1, 2} for parts in named)
    newest = default_version()
    assert newest in whole
    reached = {newest}
    while found := {old for old, new in steps if new in reached} - reached:
        reached |= found
    assert whole | {each for step in steps for each in step} == reached


#: All that the extension has, with everything about it that a script could forget.
OBJECTS = """
SELECT pg_describe_object(d.classid, d.objid, 0), pg_get_functiondef(p.oid), p.proacl::text,
       obj_description(p.oid, 'pg_proc')
FROM pg_depend AS d LEFT JOIN pg_proc AS p ON d.classid = 'pg_proc'::regclass AND p.oid = d.objid
WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
  AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'tuskline')
ORDER BY 1
"""


@pytest.mark.parametrize("major", NEWEST)
def test_an_update_ends_with_what_a_fresh_install_has(
    make_server: MakeServer, major: int, open_folder: Path
) -> None:
    """From each older version; and from a made up one before all of them, so that it is tested while there is none."""
    library = shutil.copytree(extension.build(major), open_folder / "library")
    scripts = library / "extension"
    newest, first = default_version(), SCRIPTS / f"tuskline--{default_version()}.sql"
    text = first.read_text()
    start, end = text.index("CREATE FUNCTION @extschema@.inspect("), text.index("REVOKE ALL ON ALL")
    newer = text[start:end]
    older = newer.replace(",\n    OUT marker pg_catalog.text", "")
    assert older != newer
    # Rights go with a function that is dropped, so an update that makes it again gives them again.
    (scripts / "tuskline--0.0.sql").write_text(text.replace(newer, older))
    (scripts / f"tuskline--0.0--{newest}.sql").write_text(
        f"DROP FUNCTION @extschema@.inspect(pg_catalog.name);\n{newer}{text[end:]}"
    )
    for path in scripts.iterdir():
        path.chmod(0o644)
    server = server_with(make_server, major, library)
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE EXTENSION tuskline")
        expected = connection.execute(OBJECTS.encode()).fetchall()
        assert len(expected) > 5
        ways = connection.execute(
            "SELECT source, path FROM pg_extension_update_paths('tuskline') WHERE target = %s",
            [newest],
        ).fetchall()
        assert "0.0" in {source for source, _ in ways}
        assert all(path is not None for _, path in ways)
        for source, _ in ways:
            connection.execute("DROP EXTENSION tuskline")
            connection.execute(f"CREATE EXTENSION tuskline VERSION '{source}'".encode())
            if source == "0.0":
                # A library that is newer than the script says so.
                with pytest.raises(psycopg.errors.InvalidFunctionDefinition, match="another ver"):
                    connection.execute("SELECT FROM tuskline_slots.inspect()")
                assert connection.execute(OBJECTS.encode()).fetchall() != expected
            connection.execute("ALTER EXTENSION tuskline UPDATE")
            assert connection.execute(OBJECTS.encode()).fetchall() == expected
            connection.execute("SELECT FROM tuskline_slots.inspect()")


def debian_pg_config(major: int, folder: Path) -> Path:
    """A `pg_config` with the headers that are here, and the places of Debian's server."""
    found = folder / "pg_config"
    found.write_text(
        "#!/bin/sh\ncase ${1:-} in\n"
        f"  --pkglibdir) echo /usr/lib/postgresql/{major}/lib ;;\n"
        f"  --sharedir) echo /usr/share/postgresql/{major} ;;\n"
        f"  --docdir) echo /usr/share/doc/postgresql-doc-{major} ;;\n"
        f"  *) exec '{extension.pg_config(major)}' \"$@\" ;;\nesac\n"
    )
    found.chmod(0o755)
    return found


def make_package(pg_config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["make", "-s", "-C", str(folder), "-f", str(MAKEFILE), f"PG_CONFIG={pg_config}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        [*command, "deb"], capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not here")
@pytest.mark.parametrize("major", NEWEST)
def test_a_debian_package_has_what_a_server_needs(
    make_server: MakeServer, major: int, open_folder: Path
) -> None:
    made = open_folder / "made"
    made.mkdir()
    done = make_package(debian_pg_config(major, open_folder), made)
    assert done.returncode == 0, done.stderr
    (package,) = made.glob("*.deb")
    assert package.name.startswith(f"postgresql-{major}-tuskline_{default_version()}-1_")

    def field(name: str) -> str:
        command = ["dpkg-deb", "--field", str(package), name]
        return subprocess.check_output(command, text=True).strip()

    assert field("Package") == f"postgresql-{major}-tuskline"
    assert f"postgresql-{major}, libc6 (>= 2." in field("Depends")
    root = open_folder / "root"
    subprocess.run(["dpkg-deb", "--extract", str(package), str(root)], check=True)
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    share = f"usr/share/postgresql/{major}"
    assert files == {
        f"usr/lib/postgresql/{major}/lib/tuskline.so",
        f"usr/share/doc/postgresql-{major}-tuskline/copyright",
        f"{share}/extension/tuskline.control",
        *(f"{share}/extension/{path.name}" for path in SCRIPTS.glob("*.sql")),
    }
    # What is in it works: a server takes it from there.
    server = make_server(
        major,
        extension_control_path=f"$system:{root / share}",
        dynamic_library_path=f"$libdir:{root}/usr/lib/postgresql/{major}/lib",
    )
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE EXTENSION tuskline")
        connection.execute("SELECT FROM tuskline_slots.inspect()")


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not here")
@pytest.mark.parametrize("major", NEWEST)
def test_a_package_for_a_server_elsewhere_is_refused(major: int, tmp_path: Path) -> None:
    found = extension.pg_config(major)
    assert found is not None
    done = make_package(found, tmp_path)
    assert done.returncode != 0
    assert "not Debian's" in done.stderr
    assert not [*tmp_path.glob("*.deb")]
