"""Servers of Spark's own for tests, from the classes that PySpark ships: Spark Connect, and a standalone cluster.

A client of Spark Connect needs packages that nothing else here does (pandas among them, which each Python worker would
import where it is installed), so they are in a folder of their own, which only the client has on its path.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Final

import pyspark
import pytest

import spark_consumers
import tests
from spark_consumers.spark import java
from tests.support.spark_jvm import SHORT
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import free_port

ROOT: Final = Path(tests.__path__[0]).parent
_PACKAGE: Final = Path(pyspark.__path__[0])
#: What an executor, a server or a client has to find: the package, and the modules by which Spark finds its sources.
PATHS: Final = (ROOT, Path(spark_consumers.__path__[0]) / "discovery")
#: Where `make venv` puts what a client of Spark Connect needs.
CLIENT: Final = Path(os.environ.get("TUSKLINE_TEST_CONNECT", f"{sys.prefix}/connect"))
needs_connect = pytest.mark.skipif(
    not (CLIENT / "grpc").is_dir(), reason=f"Spark Connect's client is not in {CLIENT}: make venv"
)


def missing_connect() -> str:
    """What this machine lacks for tests with Spark Connect."""
    return "" if (CLIENT / "grpc").is_dir() else f"its client is not in {CLIENT}: make venv"


def environment(*more: Path) -> dict[str, str]:
    """The environment of a Spark process of a test, with folders added to Python's path."""
    return {
        **os.environ,
        "JAVA_HOME": str(java.find().home),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(map(str, (*PATHS, *more))),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


@contextlib.contextmanager
def process(
    command: Sequence[str], env: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its children, all of which end with the block; what it says goes to `log`."""
    with log.open("ab") as output:
        started = subprocess.Popen(
            command,
            env=dict(env),
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def wait_for_port(port: int, started: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the process listens."""

    def listens() -> bool:
        assert started.poll() is None, log.read_text()[-4000:]
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return True
        return False

    wait_for(listens, 240, f"a server on port {port}")


@contextlib.contextmanager
def connect_server(
    folder: Path, env: Mapping[str, str] | None = None, jars: Sequence[Path] = ()
) -> Iterator[str]:
    """A Spark Connect server with two cores, this environment and more jars, in a folder of its own; its address."""
    port = free_port()
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.defaultJavaOptions": f"-XX:-UsePerfData -Djava.io.tmpdir={folder}",
        "spark.local.dir": str(folder),
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
    }
    env = environment() if env is None else env
    command = [
        f"{env.get('SPARK_HOME', _PACKAGE)}/bin/spark-submit",
        *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
        *("--master", "local[2]", "--driver-memory", "1g", "--name", "connect"),
        *(("--jars", ",".join(map(str, jars))) if jars else ()),
        *(part for key, value in settings.items() for part in ("--conf", f"{key}={value}")),
    ]
    log = folder / "connect.log"
    with process(command, env, log) as started:
        wait_for_port(port, started, log)
        yield f"sc://127.0.0.1:{port}"


def fetch(address: str, path: str) -> Any:
    """The JSON that a page of Spark's answers."""
    with contextlib.closing(HTTPConnection(address, timeout=30)) as connection:
        connection.request("GET", path)
        return json.load(connection.getresponse())


def job_descriptions(page: str) -> set[str]:
    """What Spark's UI says of the jobs of its application."""
    (app,) = fetch(page, "/api/v1/applications")
    jobs = fetch(page, f"/api/v1/applications/{app['id']}/jobs")
    return {job.get("description", "") for job in jobs}


@dataclass(frozen=True)
class Cluster:
    """A standalone cluster: the master's address, and that of its page."""

    master: str
    page: str

    def state(self) -> dict[str, Any]:
        """What the master says of its workers and applications."""
        found: dict[str, Any] = fetch(self.page, "/json/")
        return found

    def has_worker(self) -> bool:
        """Whether a worker is there. The page's port listens before the page has its handlers."""
        try:
            return int(self.state()["aliveworkers"]) > 0
        except (OSError, HTTPException, json.JSONDecodeError):
            return False


@contextlib.contextmanager
def standalone(folder: Path, env: Mapping[str, str], cores: int = 2) -> Iterator[Cluster]:
    """A master and a worker with so many cores, their files in a folder; executors have the environment `env`."""
    port, page, worker_page = free_port(), free_port(), free_port()
    options = (
        f"{SHORT} -XX:-UsePerfData -Djava.io.tmpdir={folder} -Dspark.master.rest.enabled=false"
    )
    env = {
        **env,
        "SPARK_DAEMON_JAVA_OPTS": options,
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_LOCAL_DIRS": str(folder),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    run, deploy = f"{env.get('SPARK_HOME', _PACKAGE)}/bin/spark-class", "org.apache.spark.deploy"
    address = f"spark://127.0.0.1:{port}"
    master = [
        *(run, f"{deploy}.master.Master", "--host", "127.0.0.1"),
        *("--port", str(port), "--webui-port", str(page)),
    ]
    worker = [
        *(run, f"{deploy}.worker.Worker", "--host", "127.0.0.1", "--cores", str(cores)),
        *("--memory", "2g", "--work-dir", str(folder / "work")),
        *("--webui-port", str(worker_page), address),
    ]
    cluster = Cluster(address, f"127.0.0.1:{page}")
    with process(master, env, folder / "master.log") as started:
        wait_for_port(port, started, folder / "master.log")
        wait_for_port(page, started, folder / "master.log")
        with process(worker, env, folder / "worker.log"):
            wait_for(cluster.has_worker, 240, "the worker")
            yield cluster
