"""The JVM of Spark drivers in tests: it lives for seconds, and is set up for that.

A driver in a test spends most of its processor time on loading classes and on compiling code that runs a few times.
The quick compiler alone, the collector with one thread and an archive of the classes, ready to be mapped, take two
thirds of it away (docs/decisions/environment.md). What Spark does is the same.

Its Python processes take PySpark from the installed package: the archive of the same modules in Spark's home, which
comes first on their path, is compiled by each of them again (0.5 s). So these drivers have a home without it.

`python -m tests.support.spark_jvm FILE` makes the archive; `make test` does so once. A JVM of another build than the
archive's runs without it.
"""

import contextlib
import os
import sys
import tempfile
import zlib
from collections.abc import MutableMapping
from importlib.util import find_spec
from pathlib import Path

from spark_consumers.spark.session import session

_CACHE = Path(__file__).resolve().parents[2] / ".cache"
ARCHIVE = _CACHE / "spark-classes.jsa"
_DRIVER, _LAUNCHER = "SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS"
#: For the drivers' JVMs, and for executors. Another JVM than HotSpot does not know them.
SHORT = "-XX:+IgnoreUnrecognizedVMOptions -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def set_up(environment: MutableMapping[str, str], *driver: str) -> None:
    """Have the drivers that are started with this environment run so, with the options `driver` added."""
    archive = [f"-XX:SharedArchiveFile={ARCHIVE}"] if ARCHIVE.exists() and not driver else []
    environment[_DRIVER] = " ".join([SHORT, *archive, *driver])
    environment[_LAUNCHER] = f"{SHORT} -XX:-UsePerfData"
    environment.setdefault("SPARK_HOME", str(_home()))


def _home() -> Path:
    """PySpark's package as Spark's home, its programs and jars alone."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    home = _CACHE / f"spark-home-{zlib.crc32(bytes(package)):08x}"
    home.mkdir(parents=True, exist_ok=True)
    for name in ("bin", "jars"):
        # Another worker of the run may make it, too.
        with contextlib.suppress(FileExistsError):
            (home / name).symlink_to(package / name)
    return home


def _train(folder: Path) -> None:
    """What drivers do: a session, an Iceberg table and its changes, queries, tasks in Python, a stream."""
    spark = session("classes", lake=folder / "lake", conf={"spark.log.level": "ERROR"})
    name = "tuskline.trained.rows"
    spark.sql(f"CREATE TABLE {name} (id bigint) USING iceberg")
    spark.range(100).writeTo(name).append()
    spark.table(name).groupBy("id").count().toArrow()
    spark.sql(f"CREATE TABLE {name}_2 USING iceberg AS SELECT id, string(id) AS text FROM {name}")
    spark.sql(f"ALTER TABLE {name}_2 ADD COLUMN at timestamp")
    spark.sql(f"DELETE FROM {name}_2 WHERE id % 3 = 0")
    spark.read.table(f"{name}_2").orderBy("id").collect()
    spark.sparkContext.parallelize(range(2), 2).map(str).collect()
    stream = spark.readStream.format("rate").load().writeStream.format("memory")
    stream.queryName("trained").trigger(availableNow=True).start().awaitTermination()
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    spark.stop()
    # The archive is written by the JVM's orderly end.
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(120)


if __name__ == "__main__":
    made = Path(sys.argv[1]).resolve()
    made.parent.mkdir(parents=True, exist_ok=True)
    draft = made.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    set_up(os.environ, f"-XX:ArchiveClassesAtExit={draft}", "-Xlog:cds=off")
    with tempfile.TemporaryDirectory(prefix="tuskline-classes-") as place:
        _train(Path(place))
    if draft.exists():
        draft.replace(made)
    else:
        print(
            "this JVM writes no archive of classes: drivers start slower in tests, and no test fails"
        )
