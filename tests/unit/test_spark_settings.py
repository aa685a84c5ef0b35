"""What a user has set for Spark wins over what `session` sets, except where a lake would not be read correctly."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spark_consumers.spark import defaults, executors, job_group, requirements
from spark_consumers.spark.given import given, properties, with_jars
from spark_consumers.spark.slots import expected, in_partitions, slots
from walsender_bridge.cli import doctor
from walsender_bridge.config.sections import LakeSection
from walsender_bridge.doctor.finding import Severity
from walsender_bridge.errors import NotSupportedError, UsageError

OURS = {
    "spark.driver.memory": "1g",
    "spark.jars": "/ours/iceberg.jar",
    "spark.master": "local[2]",
    "spark.sql.extensions": "ours.Iceberg",
    "spark.sql.session.timeZone": "UTC",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("spark.master  spark://h:7077\n", {"spark.master": "spark://h:7077"}),
        ("spark.master=yarn", {"spark.master": "yarn"}),
        ("spark.master: yarn", {"spark.master": "yarn"}),
        ("# spark.master yarn\n! spark.master yarn\n\n", {}),
        ("  spark.ui.enabled\n", {"spark.ui.enabled": ""}),
        ("spark.jars a.jar,\\\n   b.jar\nspark.x 1", {"spark.jars": "a.jar,b.jar", "spark.x": "1"}),
        (
            "spark.driver.extraJavaOptions -Da=b -Dc=d",
            {"spark.driver.extraJavaOptions": "-Da=b -Dc=d"},
        ),
    ],
)
def test_a_file_of_spark_s_defaults_is_read_as_java_does(text, expected):
    assert properties(text) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("pyspark-shell", {}),
        ("--master yarn pyspark-shell", {"spark.master": "yarn"}),
        ("--master=yarn pyspark-shell", {"spark.master": "yarn"}),
        ("--conf spark.a=1 -c spark.a=2 pyspark-shell", {"spark.a": "2"}),
        ("--conf=spark.a=b=c pyspark-shell", {"spark.a": "b=c"}),
        ("--conf 'spark.a=1 2' --verbose pyspark-shell", {"spark.a": "1 2"}),
        # spark-submit's own order: its flag wins.
        ("--driver-memory 3g --conf spark.driver.memory=2g", {"spark.driver.memory": "3g"}),
        ("--packages g:a:1 --jars x.jar", {"spark.jars.packages": "g:a:1", "spark.jars": "x.jar"}),
    ],
)
def test_the_arguments_of_pyspark_are_read_as_spark_submit_does(tmp_path, words, expected):
    assert given({"PYSPARK_SUBMIT_ARGS": words}, tmp_path) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--master yarn pyspark-shell", "--master yarn pyspark-shell"),
        ("--jars b.jar pyspark-shell", "--jars b.jar --jars a.jar,b.jar pyspark-shell"),
        ("--jars=b.jar pyspark-shell", "--jars=b.jar --jars a.jar,b.jar pyspark-shell"),
    ],
)
def test_jars_that_a_flag_names_do_not_displace_iceberg_s(arguments, expected):
    assert with_jars(arguments, "a.jar,b.jar") == expected


def test_a_flag_wins_over_the_properties_file_and_that_over_spark_s_defaults(tmp_path):
    home, conf = tmp_path / "home", tmp_path / "conf"
    for folder in (home / "conf", conf):
        folder.mkdir(parents=True)
    (home / "conf" / "spark-defaults.conf").write_text("spark.a home\nspark.b home\n")
    (conf / "spark-defaults.conf").write_text("spark.a conf\nspark.c conf\n")
    mine = tmp_path / "mine.conf"
    mine.write_text("spark.a mine\n")
    of_home = {"spark.a": "home", "spark.b": "home"}
    assert given({}, home) == of_home
    assert given({"SPARK_HOME": str(home)}, tmp_path) == of_home
    named = {"SPARK_CONF_DIR": str(conf)}
    assert given(named, home) == {"spark.a": "conf", "spark.c": "conf"}
    alone = {**named, "PYSPARK_SUBMIT_ARGS": f"--properties-file {mine}"}
    assert given(alone, home) == {"spark.a": "mine"}
    both = {**named, "PYSPARK_SUBMIT_ARGS": f"--load-spark-defaults --properties-file {mine}"}
    assert given(both, home) == {"spark.a": "mine", "spark.c": "conf"}
    flag = {**named, "PYSPARK_SUBMIT_ARGS": "--conf spark.a=flag"}
    assert given(flag, home) == {"spark.a": "flag", "spark.c": "conf"}


def test_the_program_s_settings_win_over_the_user_s_and_these_over_ours():
    theirs = {"spark.driver.memory": "4g", "spark.master": "yarn", "spark.eventLog.enabled": "true"}
    found = defaults.merged(OURS, theirs, {"spark.master": "local[1]"})
    assert found == {**OURS, **theirs, "spark.master": "local[1]"}


def test_jars_and_extensions_of_the_user_are_kept_beside_ours():
    theirs = {"spark.jars": "/theirs/udf.jar, /b.jar", "spark.sql.extensions": "their.Extension"}
    found = defaults.merged(OURS, theirs, {})
    assert found["spark.jars"] == "/theirs/udf.jar,/b.jar,/ours/iceberg.jar"
    assert found["spark.sql.extensions"] == "their.Extension,ours.Iceberg"
    twice = defaults.merged(OURS, {"spark.sql.extensions": "ours.Iceberg"}, {})
    assert twice["spark.sql.extensions"] == "ours.Iceberg"
    assert "spark.jars" not in defaults.merged({"spark.jars": ""}, {}, {})


@pytest.mark.parametrize(
    ("settings", "home", "formats", "added"),
    [
        ({}, (), set(), ["iceberg-spark-runtime-4.1.jar", "delta-spark_4.1.jar", "shims.jar"]),
        (
            {"spark.jars.packages": "o:iceberg-spark-runtime-4.1_2.13:1.12.0"},
            (),
            {defaults.ICEBERG},
            [],
        ),
        ({"spark.jars": "/x/iceberg-spark-runtime-4.1.jar"}, (), {defaults.ICEBERG}, []),
        ({}, ("iceberg-spark-runtime-4.1.jar",), {defaults.ICEBERG}, []),
        ({}, ("delta-spark_4.1.jar",), {defaults.DELTA}, ["iceberg-spark-runtime-4.1.jar"]),
    ],
)
def test_no_second_iceberg_joins_the_one_that_a_user_brings(settings, home, formats, added):
    ours = [Path("iceberg-spark-runtime-4.1.jar"), Path("delta-spark_4.1.jar"), Path("shims.jar")]
    assert defaults.brought(settings, home) == formats
    assert [jar.name for jar in defaults.added_jars(ours, formats)] == added


def test_a_table_format_that_is_not_there_is_not_set_up():
    found = defaults.of_any_session([defaults.ICEBERG], "python3")
    assert "delta" not in str(found)
    assert "iceberg" in found["spark.sql.extensions"]
    assert defaults.of_any_session([], "python3")["spark.sql.extensions"] == ""


def test_a_catalog_that_is_another_lake_s_is_refused_by_name():
    wanted = defaults.of_lake("/srv/lake", "tuskline")
    key = "spark.sql.catalog.tuskline"
    defaults.check_catalog(wanted, {**wanted, f"{key}.cache-enabled": "true"})
    with pytest.raises(
        UsageError, match=rf"{key}\.warehouse = /other/tables, not /srv/lake/tables"
    ) as found:
        defaults.check_catalog(wanted, {f"{key}.warehouse": "/other/tables"})
    assert "another catalog" in found.value.repair


def test_a_file_system_that_verifies_no_checksums_is_refused_by_name():
    key, files = "spark.hadoop.fs.file.impl", "org.apache.hadoop.fs"
    requirements.check_settings({})
    requirements.check_settings({key: f"{files}.LocalFileSystem"})
    with pytest.raises(NotSupportedError, match=rf"{key} is .*\.RawLocalFileSystem") as found:
        requirements.check_settings({key: f"{files}.RawLocalFileSystem"})
    assert found.value.repair == f"remove the setting {key}"


@pytest.mark.parametrize(
    ("jar", "spark", "refused"),
    [
        ("org.apache.iceberg_iceberg-spark-runtime-4.1_2.13-1.12.0.jar", "4.1.4", False),
        ("iceberg-spark-runtime-4.1_2.13-1.13.1.jar", "4.1.0-vendor", False),
        ("iceberg-spark-runtime-4.1_2.13.jar", "4.1.4", False),
        ("iceberg-spark-runtime-4.0_2.13-1.12.0.jar", "4.1.4", True),
        ("iceberg-spark-runtime-3.5_2.13-1.9.0.jar", "4.1.4", True),
        # A jar that somebody has built has any name.
        ("everything.jar", "4.1.4", False),
    ],
)
def test_iceberg_for_another_spark_is_refused_with_its_jar(jar, spark, refused):
    found = requirements.other_runtime(f"jar:file:/opt/{jar}!/org/x.class", spark)
    assert (found is not None) == refused
    if found is not None:
        assert found.where == f"jar:file:/opt/{jar}"
        assert found.repair == "use iceberg-spark-runtime-4.1_2.13 instead"


@pytest.mark.parametrize("version", ["1.9.2", "1.11.0"])
def test_iceberg_that_filters_older_rows_by_no_default_is_refused(version):
    jar = f"org.apache.iceberg_iceberg-spark-runtime-4.1_2.13-{version}.jar"
    found = requirements.other_runtime(f"jar:file:/opt/{jar}!/org/x.class", "4.1.4")
    assert found is not None
    assert "omits rows" in found.what
    assert found.where == f"jar:file:/opt/{jar}"


@pytest.mark.parametrize(
    ("master", "local"),
    [
        ("local", True),
        ("local[2]", True),
        ("local-cluster[2,1,1024]", True),
        ("spark://h:7077", False),
        ("yarn", False),
        ("k8s://https://h:6443", False),
    ],
)
def test_only_a_master_of_this_machine_gets_the_settings_of_one(master, local):
    assert defaults.is_local(master) == local


PACKAGES = (("tuskline", "0.1.0"), ("pyarrow", "25.0.0"))
DRIVER = executors.Found("driver", "3.11.2", PACKAGES, "lake-a")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"python": "3.11.9"}, []),
        ({"python": "3.12.1"}, ["it has Python 3.12.1, and the driver Python 3.11.2"]),
        (
            {"packages": (("tuskline", None), PACKAGES[1])},
            ["the package tuskline is not installed"],
        ),
        ({"packages": (PACKAGES[0], ("pyarrow", None))}, ["the package pyarrow is not installed"]),
        (
            {"packages": (("tuskline", "0.0.9"), PACKAGES[1])},
            ["it has tuskline 0.0.9, and the driver 0.1.0"],
        ),
        # What the package asks for is pip's to decide.
        ({"packages": (PACKAGES[0], ("pyarrow", "24.0.0"))}, []),
        ({"lake": None}, ["the lake's folder is not there, or is another lake's"]),
        ({"lake": "lake-b"}, ["the lake's folder is not there, or is another lake's"]),
    ],
)
def test_what_an_executor_lacks_is_named_with_its_host(change, expected):
    executor = replace(DRIVER, host="far", **change)
    errors = [*executors.lacking(DRIVER, [replace(DRIVER, host="near"), executor])]
    assert [error.what for error in errors] == expected
    assert {error.where for error in errors} <= {"executor on far"}
    assert all(error.repair for error in errors)


def test_an_executor_without_the_daemon_s_module_is_told_which_setting_names_it():
    text = "Caused by: org.apache.spark.SparkException: Error while finding module specification for x (No module named 'spark_consumers')"
    daemon = "spark_consumers.spark.daemon"
    assert "spark.python.daemon.module" in executors.cannot_run(text, daemon).what
    other = executors.cannot_run("Stack:\nOSError: no such python\n\tat x", daemon)
    assert other.what == "executors cannot run a task of Python: OSError: no such python"


def test_a_driver_that_is_not_installed_asks_for_nothing_more_of_executors():
    driver = replace(DRIVER, packages=(("tuskline", None), PACKAGES[1]))
    assert not [*executors.lacking(driver, [driver])]


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        (["shop.public.orders"], "shop.public.orders"),
        (["c", "a", "b"], "a, b, c"),
        (["d", "c", "a", "b"], "a, b, and 2 other tables"),
    ],
)
def test_a_job_says_what_it_does_for_which_tables(tables, expected):
    found = job_group.description("epoch 123", "lake", tables, "fold and write")
    assert found == f"tuskline: epoch 123 of lake lake: {expected}, fold and write"


@pytest.mark.parametrize(
    ("now", "is_dynamic", "most", "cores", "cpus", "slots"),
    [
        (8, False, "100", 4, 1, 8),
        # No executor is there yet: Spark says 2.
        (2, True, "5", 4, 1, 20),
        (2, True, "5", 4, 2, 10),
        (2, True, None, 4, 1, 64),
        (2, True, "infinity", 4, 1, 64),
        (200, True, "500", 4, 1, 200),
        (2, True, "3", 1, 2, 3),
    ],
)
def test_dynamic_allocation_is_asked_for_the_executors_it_may_have(
    now, is_dynamic, most, cores, cpus, slots
):
    assert expected(now, is_dynamic=is_dynamic, most=most, cores=cores, cpus=cpus) == slots


def test_the_doctor_names_the_one_setting_that_is_wrong(tmp_path, monkeypatch):
    key = "spark.hadoop.fs.file.impl"
    file = tmp_path / "spark-defaults.conf"
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    lake = LakeSection(uri=str(tmp_path / "lake"))

    def errors():
        found = [*doctor._spark(lake)]
        return [(each.what, each.repair) for each in found if each.severity is Severity.ERROR]

    file.write_text(f"spark.executor.memory 8g\n{key} org.apache.hadoop.fs.LocalFileSystem\n")
    assert errors() == []
    file.write_text(f"spark.executor.memory 8g\n{key} org.apache.hadoop.fs.RawLocalFileSystem\n")
    ((what, repair),) = errors()
    assert f"the Spark setting {key} is org.apache.hadoop.fs.RawLocalFileSystem" in what
    assert repair == f"remove the setting {key}"


@pytest.mark.parametrize(
    ("count", "at_once", "each", "partitions"),
    [
        (1, 8, 16, 1),
        (8, 8, 16, 8),
        (100, 8, 16, 8),
        # More than run at once, lest an executor that goes takes too much along, and one that comes finds nothing to do.
        (129, 8, 16, 9),
        (2400, 2, 16, 150),
    ],
)
def test_many_tasks_are_as_many_of_sparks_as_run_at_once_or_more(count, at_once, each, partitions):
    assert in_partitions(count, at_once, each) == partitions


def test_the_settings_of_a_context_are_asked_once():
    """Spark copies all of them each time, and an epoch runs several jobs."""
    asked = []

    class Context:
        defaultParallelism = 2  # noqa: N815  # Spark's name

        def getConf(self):  # noqa: N802  # as above
            asked.append(1)
            return {
                "spark.dynamicAllocation.enabled": "true",
                "spark.dynamicAllocation.maxExecutors": "5",
            }

    context: Any = Context()
    assert [slots(context) for _ in range(3)] == [5, 5, 5]
    context.defaultParallelism = 9
    assert slots(context) == 9
    assert len(asked) == 1
