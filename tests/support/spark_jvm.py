"""The JVM of Spark drivers in tests: it lives for seconds, and is set up for that.

A driver in a test spends most of its processor time on loading classes and on compiling code that runs a few times.
The quick compiler alone, the collector with one thread and an archive of the classes, ready to be mapped, take two
thirds of it away (docs/decisions/environment.md). What Spark does is the same.

They have a Spark home of their own (`SPARK_HOME`), which differs from PySpark's package in two things:

- The table formats' jars are on its class path. Classes of `spark.jars` are in a class loader of which an archive holds none.
- The archive of PySpark's modules is missing. It comes first on the path of each Python process that plans a read, which
  compiles all that it needs of it (0.5 s); from the package, that is read as bytecode.

Tests of the session itself, of executors and of spark-submit run in PySpark's own home (`in_pysparks_home`).

`python -m tests.support.spark_jvm FILE` makes the archive; `make test` does so once. A JVM of another build than the
archive's runs without it.
"""

import contextlib
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

import pyspark

from spark_consumers.spark import jars
from spark_consumers.spark.session import session

_CACHE = Path(__file__).resolve().parents[2] / ".cache"
_PACKAGE = Path(pyspark.__path__[0])
ARCHIVE = _CACHE / "spark-classes.jsa"
_DRIVER, _LAUNCHER = "SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS"
#: For the drivers' JVMs, and for executors. Another JVM than HotSpot does not know them.
#: With the quick compiler alone, compiled code has 48 MB by default: a worker's session fills them in two minutes. From then on its JVM
#: throws code away, compiles next to nothing, and interprets.
SHORT = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
    " -XX:+UseSerialGC"
)


def set_up(environment: MutableMapping[str, str], *driver: str) -> None:
    """Have the drivers that are started with this environment run so, with the options `driver` added."""
    archive = [f"-XX:SharedArchiveFile={ARCHIVE}"] if ARCHIVE.exists() and not driver else []
    environment[_DRIVER] = " ".join([SHORT, *archive, *driver])
    environment[_LAUNCHER] = f"{SHORT} -XX:-UsePerfData"
    environment.setdefault("SPARK_HOME", str(_home()))


def in_pysparks_home(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a driver whose Spark home is PySpark's package, as users have it; the archive is not for it."""
    kept = {name: value for name, value in environment.items() if name != "SPARK_HOME"}
    return kept | {_DRIVER: SHORT}


@contextlib.contextmanager
def work_removed() -> Iterator[None]:
    """Remove what executors of the block leave in PySpark's home."""
    work = _PACKAGE / "work"
    before = set(work.glob("*"))
    try:
        yield
    finally:
        for folder in set(work.glob("*")) - before:
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            work.rmdir()


def _home() -> Path:
    """The home for these jars, made if it is not there."""
    links = {"bin": _PACKAGE / "bin"}
    for jar in [*(_PACKAGE / "jars").glob("*.jar"), *jars.kept()]:
        links[f"jars/{jar.name}"] = jar
    key = zlib.crc32("\n".join(map(str, sorted(links.values()))).encode())
    home = _CACHE / f"spark-home-{key:08x}"
    if not home.exists():
        _CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE, prefix="spark-home-") as folder:
            made = Path(folder) / "home"
            (made / "jars").mkdir(parents=True)
            for name, target in links.items():
                (made / name).symlink_to(target)
            # Another worker of the run may have made it meanwhile.
            with contextlib.suppress(OSError):
                made.rename(home)
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
    jars.paths()
    jars.paths(wanted=jars.S3)
    set_up(os.environ, f"-XX:ArchiveClassesAtExit={draft}", "-Xlog:cds=off")
    with tempfile.TemporaryDirectory(prefix="tuskline-classes-") as place:
        _train(Path(place))
    if draft.exists():
        draft.replace(made)
    else:
        print(
            "this JVM writes no archive of classes: drivers start slower in tests, and no test fails"
        )
