"""A Spark session that can read and write a lake: Java, jars, catalog and time zone set up.

Tuskline's sources are found in any PySpark 4.1 session without this. It is for those who have no session
yet: the pipeline, the demo, the tests, a notebook on a laptop. What a user has set for Spark (`given`), what spark-submit's
flags say, and a session that runs already go before what is chosen here (`defaults`).
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from spark_consumers.spark import (
    buckets,
    defaults,
    given,
    jars,
    java,
    lake_catalog,
    requirements,
)
from spark_consumers.spark.defaults import DELTA, ICEBERG
from walsender_bridge.errors import UsageError

CATALOG = "tuskline"
#: What spark-submit gives a Python program: where the JVM that it has started listens.
_SUBMITTED = "PYSPARK_GATEWAY_PORT"


def catalog_settings(
    lake: str | Path,
    catalog: str = CATALOG,
    *,
    endpoint: str | None = None,
    region: str | None = None,
) -> dict[str, str]:
    """The settings that make `catalog` the lake's tables.

    An Iceberg catalog in the folder `<lake>/tables`; where the lake's tables are in a REST catalog, that one, with the token
    or the client's credential of this process's environment. `endpoint` and `region`: see `session`.
    """
    found = lake_catalog.of_lake_at(lake, endpoint, region)
    if found is None:
        return defaults.of_lake(lake, catalog)
    wanted = lake_catalog.spark_settings(found, catalog, os.environ)
    if buckets.is_bucket(lake):
        wanted[f"spark.sql.catalog.{catalog}.io-impl"] = buckets.HADOOP_FILE_IO
    return wanted


def settings(
    *,
    lake: str | Path | None = None,
    catalog: str = CATALOG,
    progress: jars.Progress = jars.print_progress,
) -> dict[str, str]:
    """Everything `session` sets on one machine beyond name and master, for those who build their own session."""
    return {
        **defaults.of_one_machine(),
        **defaults.of_any_session((ICEBERG, DELTA), _python()),
        "spark.jars": ",".join(
            str(jar) for jar in [*jars.paths(progress), *_jars_of(lake, progress)]
        ),
        **buckets.of_started(buckets.settings(lake, None, None)),
        **(catalog_settings(lake, catalog) if lake is not None else {}),
    }


def master_of(master: str | None = None) -> str:
    """The master of a session that is started here: this one, or the one that the user has set for Spark, or `local[2]`."""
    return master or given.here().get("spark.master") or defaults.MASTER


def python_of() -> str:
    """The workers' Python in a session that is started here."""
    return given.here().get("spark.pyspark.python") or _python()


def session(
    app_name: str = "tuskline",
    master: str | None = None,
    *,
    lake: str | Path | None = None,
    catalog: str = CATALOG,
    conf: Mapping[str, str] | None = None,
    default_conf: Mapping[str, str] | None = None,
    progress: jars.Progress = jars.print_progress,
    endpoint: str | None = None,
    region: str | None = None,
) -> SparkSession:
    """The process's Spark session, started if there is none; with SPARK_REMOTE set, one of Spark Connect.

    `lake` names the lake's root folder or URI and makes its tables the catalog `catalog` (which is a REST catalog where the lake
    has its tables in one); on a session that
    runs already the catalog is added to it, so several lakes can be read at once under different names.
    `endpoint` and `region`: of its bucket, if it is in one; by default as the environment says.
    A session that is started has what the user has set in `spark-defaults.conf` and PYSPARK_SUBMIT_ARGS; where that leaves
    the master open, it is `local[2]`. `conf` overrides any setting; on a running session only what Spark can change then.
    `default_conf` holds only where the user has set nothing. Driver memory and jars are set when the JVM starts. Under
    spark-submit its own master, name and settings are kept; only what is in `conf` overrides them. Raises `NotSupportedError`
    without a Java, without Iceberg's jar in a JVM that runs already, or for a setting with which a lake is not read
    correctly, `UnavailableError` when the jars cannot be fetched, `UsageError` for a catalog name that is another lake's.
    """
    wanted = {}
    if lake is not None:
        wanted = catalog_settings(lake, catalog, endpoint=endpoint, region=region)
    asked = dict(conf or {})
    if is_remote() or SparkContext._active_spark_context is not None:  # noqa: SLF001  # a session is active in its thread only
        # A builder does not know the address of a session of Spark Connect that another one has made.
        active = SparkSession.getActiveSession() if is_remote() else None
        running = active or SparkSession.builder.getOrCreate()
        if lake is not None:
            requirements.check(running)
            buckets.use(running, lake, endpoint, region)
        for key, value in (wanted | asked).items():
            _set(running, key, value, fixed=key in wanted and not lake_catalog.is_secret(key))
        return running
    if submitted():
        theirs, ours = _of_submitted()
        if buckets.is_bucket(lake):
            buckets.check(SparkContext._jvm)  # noqa: SLF001  # PySpark's own JVM
    else:
        theirs = given.here()
        asked = {"spark.master": master, **asked} if master else asked
        ours = {"spark.app.name": app_name, **_of_started(theirs | asked, lake, progress)}
        ours |= default_conf or {}
    ours |= lake_catalog.redaction(wanted)
    ours |= buckets.of_started(buckets.settings(lake, endpoint, region))
    defaults.check_catalog(wanted, theirs)
    found = defaults.merged(ours | wanted, theirs, asked)
    requirements.check_settings(found)
    if not submitted():
        _set_environment(found)
    builder = SparkSession.builder
    for key, value in found.items():
        builder = builder.config(key, value)
    # Once its JVM runs, nothing can be added to its class path.
    SparkContext._ensure_initialized(conf=SparkConf().setAll([*found.items()]))  # noqa: SLF001  # PySpark's own way to start it
    requirements.check_iceberg(SparkContext._jvm)  # noqa: SLF001  # as above
    return builder.getOrCreate()


def is_alive(spark: SparkSession) -> bool:
    """Whether the session's JVM is there."""
    try:
        return not spark._jsc.sc().isStopped()  # noqa: SLF001  # no public way
    except Exception:
        return False


def submitted() -> bool:
    """Whether spark-submit runs this program: the JVM is its, and the session begins in it."""
    return _SUBMITTED in os.environ


def _of_submitted() -> tuple[dict[str, str], dict[str, str]]:
    """What spark-submit has made of its flags and files, and what is ours in its JVM."""
    SparkContext._ensure_initialized()  # noqa: SLF001  # PySpark's own way to a JVM that runs
    theirs = dict(SparkConf().getAll())
    formats = requirements.formats_in(SparkContext._jvm)  # noqa: SLF001  # as above
    ours = defaults.of_any_session(formats, _python())
    if defaults.is_local(theirs.get("spark.master", "")):
        ours["spark.python.daemon.module"] = defaults.DAEMON
    return theirs, ours


def _jars_of(lake: str | Path | None, progress: jars.Progress) -> list[Path]:
    """The jars that a lake in a bucket needs besides."""
    return jars.paths(progress, jars.S3) if buckets.is_bucket(lake) else []


def _of_started(
    known: Mapping[str, str], lake: str | Path | None, progress: jars.Progress
) -> dict[str, str]:
    """What is ours in a session that is started here, where these settings are known."""
    master = known.get("spark.master", defaults.MASTER)
    here = [jar.name for jar in (_spark_home() / "jars").glob("*.jar")]
    formats = defaults.brought(known, here)
    added = defaults.added_jars([] if ICEBERG in formats else jars.paths(progress), formats)
    formats |= defaults.brought({}, [jar.name for jar in added])
    if not any("hadoop-aws" in each for each in (known.get("spark.jars.packages", ""), *here)):
        added += _jars_of(lake, progress)
    return {
        **(defaults.of_one_machine() if defaults.is_local(master) else {}),
        **defaults.of_any_session(formats, _python()),
        "spark.jars": ",".join(map(str, added)),
        "spark.master": master,
    }


def _set_environment(found: Mapping[str, str]) -> None:
    """Set for the JVM, and for what PySpark reads in this process, what Spark takes from the environment only."""
    os.environ["JAVA_HOME"] = str(java.find().home)
    os.environ["PYSPARK_PYTHON"] = found["spark.pyspark.python"]
    os.environ["PYSPARK_DRIVER_PYTHON"] = found["spark.pyspark.driver.python"]
    if defaults.is_local(found["spark.master"]):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if arguments := os.environ.get("PYSPARK_SUBMIT_ARGS"):
        os.environ["PYSPARK_SUBMIT_ARGS"] = given.with_jars(arguments, found.get("spark.jars", ""))
    # The JVM that only makes up the other one's command line keeps no counters in /tmp.
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", "-XX:-UsePerfData")


def _python() -> str:
    """The workers' Python, where Spark's settings name none."""
    return os.environ.get("PYSPARK_PYTHON") or sys.executable


def _spark_home() -> Path:
    import pyspark

    return Path(os.environ.get("SPARK_HOME") or pyspark.__path__[0])


def _set(running: SparkSession, key: str, value: str, *, fixed: bool) -> None:
    """Set it, unless it is so already; a `fixed` one may not be something else already."""
    now = running.conf.get(key, None)
    if now == value:
        return
    if fixed and now is not None:
        raise UsageError(
            f"this Spark session has {key} = {now}, not {value}",
            repair="specify another catalog for the second lake, or stop the session first",
        )
    running.conf.set(key, value)
