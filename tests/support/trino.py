"""A Trino server that reads a lake's tables: its archive from Maven Central, unpacked once (2 GB), and a Java that it accepts.

476 is the newest whose archive Maven Central has. A table is registered in a catalog of Trino's own, by its metadata file.
"""

import contextlib
import json
import re
import shutil
import subprocess
import urllib.request
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest

from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.runtime import cache

VERSION: Final = "476"
#: The oldest Java that it starts with.
_JAVA: Final = 24
_COORDINATES: Final = f"io.trino:trino-server:{VERSION}:tar.gz"
_CONFIG = """\
coordinator=true
node-scheduler.include-coordinator=true
http-server.http.port={port}
discovery.uri=http://127.0.0.1:{port}
query.max-memory=500MB
query.max-memory-per-node=500MB
plugin.dir={folder}/plugin
catalog.config-dir={folder}/catalog
"""
_CATALOG = """\
connector.name=iceberg
iceberg.catalog.type=TESTING_FILE_METASTORE
hive.metastore.catalog.dir=file://{folder}/metastore
iceberg.register-table-procedure.enabled=true
fs.hadoop.enabled=true
"""


class QueryError(Exception):
    """What Trino says of a query that failed."""


class Trino:
    """A running server, at a port of 127.0.0.1."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/statement"
        self._tables = 0

    def rows(self, metadata: str) -> pa.Table:
        """The table of a metadata file. Raises `QueryError`."""
        self._tables += 1
        name = f"t{self._tables}"
        file = Path(metadata)
        self.query(
            "CALL lake.system.register_table(schema_name => 's', table_name => "
            f"'{name}', table_location => '{file.parent.parent}', metadata_file_name => '{file.name}')"
        )
        columns, rows = self.query(f"SELECT * FROM lake.s.{name}")
        found = zip(*rows, strict=True) if rows else [()] * len(columns)
        arrays = [_arrow(kind, list(v)) for (_, kind), v in zip(columns, found, strict=True)]
        return pa.table(arrays, names=[column for column, _ in columns])

    def query(self, text: str) -> tuple[list[tuple[str, str]], list[list[Any]]]:
        """The columns and rows of a query, as JSON has them. Raises `QueryError`."""
        # Without the capability it rounds times to milliseconds.
        headers = {
            "X-Trino-User": "tests",
            "X-Trino-Time-Zone": "UTC",
            "X-Trino-Client-Capabilities": "PARAMETRIC_DATETIME",
        }
        request = urllib.request.Request(self._url, text.encode(), headers)  # noqa: S310  # our own
        columns: list[tuple[str, str]] = []
        rows: list[list[Any]] = []
        while True:
            with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310  # as above
                page = json.load(answer)
            if "error" in page:
                raise QueryError(page["error"]["message"])
            columns = [(c["name"], c["type"]) for c in page.get("columns", ())] or columns
            rows += page.get("data", ())
            if "nextUri" not in page:
                return columns, rows
            request = page["nextUri"]


@contextlib.contextmanager
def trino(folder: Path) -> Iterator[Trino]:
    """A server with its files in `folder`; skips where its archive, or a Java for it, cannot be had."""
    home, java = _home(), _java()
    if home is None or java is None:
        pytest.skip(f"no Trino: needs Maven ({_COORDINATES}) and Java {_JAVA} or newer")
    port = free_port()
    for name in ("plugin", "catalog", "metastore", "data"):
        (folder / name).mkdir(parents=True)
    # Its other plugins take half a minute to load.
    (folder / "plugin" / "iceberg").symlink_to(home / "plugin" / "iceberg")
    (folder / "config.properties").write_text(_CONFIG.format(port=port, folder=folder))
    (folder / "catalog" / "lake.properties").write_text(_CATALOG.format(folder=folder))
    options = {
        "node.environment": "tests",
        "node.id": "tests",
        "node.data-dir": folder / "data",
        "node.bind-ip": "127.0.0.1",
        "node.internal-address": "127.0.0.1",
        "config": folder / "config.properties",
        "jdk.attach.allowAttachSelf": "true",
    }
    command = [java, "-cp", f"{home}/lib/*", "-Xmx2G", "-XX:TieredStopAtLevel=1"]
    command += ["--add-modules=jdk.incubator.vector", "--enable-native-access=ALL-UNNAMED"]
    command += [*(f"-D{k}={v}" for k, v in options.items()), "io.trino.server.TrinoServer"]
    output = folder / "server.log"
    with output.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:

        def has_started() -> bool:
            assert process.poll() is None, output.read_text()[-3000:]
            return "SERVER STARTED" in output.read_text()

        wait_for(has_started, 400, "Trino's start")
        running = Trino(port)
        running.query(f"CREATE SCHEMA lake.s WITH (location = 'file://{folder}/metastore/s')")
        yield running
    finally:
        process.kill()
        process.wait()


def _home() -> Path | None:
    """Trino's folder, downloaded and unpacked if need be."""
    folder, maven = cache.folder() / "trino", shutil.which("mvn")
    home = folder / f"trino-server-{VERSION}"
    if home.exists() or maven is None:
        return home if home.exists() else None
    with cache.exclusive(folder):
        if not home.exists():
            draft = folder / "draft"
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            copy = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy"
            wanted = [f"-Dartifact={_COORDINATES}", f"-DoutputDirectory={draft}"]
            if subprocess.run([maven, "-q", "-B", copy, *wanted], cwd=draft).returncode != 0:
                return None
            (archive,) = draft.glob("*.tar.gz")
            subprocess.run(["tar", "-xzf", archive, "-C", draft], check=True)
            archive.unlink()
            (draft / home.name).rename(home)
    return home


def _java() -> str | None:
    """The first Java that is new enough."""
    found = [shutil.which("java"), *map(str, sorted(Path("/usr/lib/jvm").glob("*/bin/java")))]
    return next((java for java in found if java is not None and _release(java) >= _JAVA), None)


def _release(java: str) -> int:
    said = subprocess.run([java, "-version"], capture_output=True, text=True).stderr
    match = re.search(r'version "(\d+)', said)
    return int(match[1]) if match else 0


#: How a value of a type is in JSON, and what it becomes.
_TYPES: dict[str, tuple[pa.DataType, Callable[[Any], Any]]] = {
    "boolean": (pa.bool_(), bool),
    "integer": (pa.int32(), int),
    "bigint": (pa.int64(), int),
    "real": (pa.float32(), float),
    "double": (pa.float64(), float),
    "varchar": (pa.string(), str),
    "varbinary": (pa.binary(), b64decode),
    "date": (pa.date32(), date.fromisoformat),
    "timestamp(6)": (pa.timestamp("us"), datetime.fromisoformat),
    "timestamp(6) with time zone": (
        pa.timestamp("us", "UTC"),
        lambda text: datetime.fromisoformat(text.replace(" UTC", "+00:00")),
    ),
}


def _type(name: str) -> tuple[pa.DataType, Callable[[Any], Any]]:
    if match := re.fullmatch(r"decimal\((\d+), ?(\d+)\)", name):
        return pa.decimal128(int(match[1]), int(match[2])), Decimal
    if match := re.fullmatch(r"array\((.+)\)", name):
        kind, element = _type(match[1])
        return pa.list_(kind), lambda values: [None if v is None else element(v) for v in values]
    return _TYPES[name]


def _arrow(name: str, values: Sequence[Any]) -> pa.Array:
    kind, value = _type(name)
    return pa.array([None if v is None else value(v) for v in values], kind)
