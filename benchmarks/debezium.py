"""The peer Debezium: its asynchronous embedded engine, from Maven, behind a small program of this repository.

`debezium_peer/` holds the program and its dependencies. The jars are resolved once into the cache; Java
compiles the program as it starts it. What counts is the second half of the rows: by then the JVM is warm.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from benchmarks.report import Round, load
from benchmarks.workload import PUBLICATION, Workload
from walsender_bridge.runtime import cache

VERSION = "3.4.1.Final"
_HERE = Path(__file__).parent / "debezium_peer"
_SLOT = "bench_debezium"


def _folder() -> Path:
    return cache.folder() / "benchmarks" / f"debezium-{VERSION}"


def available() -> bool:
    """Whether it can run here: with a JDK, and the jars or Maven to fetch them."""
    return shutil.which("javac") is not None and (
        _folder().is_dir() or shutil.which("mvn") is not None
    )


def _jars() -> Path:
    """The folder of its jars, which are resolved first if it does not exist."""
    target = _folder()
    with cache.exclusive(target):
        if not target.is_dir():
            aside = target.with_name(f".{target.name}.new")
            shutil.rmtree(aside, ignore_errors=True)
            command = [
                *("mvn", "-q", "-B", f"-Ddebezium.version={VERSION}", "-f", str(_HERE / "pom.xml")),
                *("dependency:copy-dependencies", f"-DoutputDirectory={aside}"),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"Maven could not get Debezium:\n{done.stdout[-1500:]}")
            aside.rename(target)
    return target


def turn(work: Workload, folder: Path) -> Round:
    """Read the load once."""
    busy = load()
    jars = _jars()
    server = conninfo_to_dict(work.dsn)
    properties = {
        "name": "bench",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "plugin.name": "pgoutput",
        "topic.prefix": "bench",
        "database.hostname": server["host"],
        "database.port": server["port"],
        "database.user": server["user"],
        "database.password": server.get("password", ""),
        "database.dbname": server["dbname"],
        "slot.name": _SLOT,
        "publication.name": PUBLICATION,
        "publication.autocreate.mode": "disabled",
        "snapshot.mode": "no_data",
        "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
        "offset.storage.file.filename": str(folder / "offsets"),
        "offset.flush.interval.ms": "1000",
        "max.batch.size": "16384",
        "max.queue.size": "65536",
        "poll.interval.ms": "10",
        "tombstones.on.delete": "false",
    }
    given = folder / "debezium.properties"
    given.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
    with work.slot(_SLOT), (folder / "debezium.log").open("wb") as log:
        done = subprocess.run(
            [
                *("java", "-Xmx2g", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"),
                *("-cp", f"{jars}/*", str(_HERE / "Peer.java"), str(given), str(work.rows + 1)),
            ],
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
            timeout=1800,
            check=False,
        )
    lines = done.stdout.decode().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"Debezium failed:\n{(folder / 'debezium.log').read_text()[-3000:]}")
    found = json.loads(lines[-1])
    rows = work.rows + 1 - found["half_rows"]
    return Round(
        "debezium",
        work.name,
        rows,
        found["wall"] - found["half_wall"],
        found["cpu"] - found["half_cpu"],
        dict(sorted(found["rows"].items())),
        busy,
        {"whole_wall": found["wall"], "whole_cpu": found["cpu"]},
    )
