"""What doctor knows of versions and of this machine."""

from pathlib import Path

import pytest

from spark_consumers.lake import folder
from spark_consumers.spark import versions
from walsender_bridge.doctor import machine
from walsender_bridge.doctor.finding import Severity, counted
from walsender_bridge.doctor.unsafe_versions import FAULTS, faults_of
from walsender_bridge.errors import LakeError
from walsender_bridge.provisioning.fixes import fix


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (160_003, ["inside a transaction", "ALTER PUBLICATION"]),
        (160_004, ["ALTER PUBLICATION"]),
        (160_009, ["invalid memory alloc"]),
        (160_014, []),
        (170_005, ["invalid memory alloc"]),
        (170_000, ["ALTER PUBLICATION"]),
        (180_000, []),
        (140_003, ["inside a transaction", "ALTER PUBLICATION", "CONCURRENTLY"]),
        (110_022, []),
    ],
)
def test_minor_versions_that_are_unsafe(version, words):
    reasons = faults_of(version)
    assert len(reasons) == len(words)
    for reason, word in zip(reasons, words, strict=True):
        assert word in reason


def test_every_fault_is_mended_after_it_came():
    for fault in FAULTS:
        for major, minor in fault.fixed_in.items():
            assert fault.since.get(major, 0) < minor


@pytest.mark.parametrize(
    ("pyspark", "delta", "java", "word"),
    [
        ("4.1.4", None, None, ""),
        ("4.2.1", None, None, "Delta works with it"),
        ("4.3.0", None, None, "neither Iceberg nor Delta"),
        ("3.5.8", None, None, "jars are for 4.1"),
        (None, None, None, "not installed"),
        ("4.1.4", "4.4.1", None, "delta-spark"),
        ("4.1.4", None, "Spark needs Java 17 to 22; /usr/bin/java (PATH) is 25", "is 25"),
    ],
)
def test_versions_that_do_not_work_together(pyspark, delta, java, word):
    found = versions.problems(pyspark, delta, java)
    assert [word in problem.what for problem in found] == ([True] if word else [])
    assert all(problem.repair for problem in found)


def test_what_is_installed_here_fits():
    assert versions.here() == []


@pytest.mark.parametrize(
    ("free", "severity"),
    [
        (machine.TOO_LITTLE - 1, Severity.ERROR),
        (machine.TOO_LITTLE, Severity.WARNING),
        (machine.LITTLE, Severity.OK),
    ],
)
def test_room(free, severity):
    assert machine.room("log", Path("/x"), free).severity is severity


def test_a_lake_folder_that_spark_does_not_read(tmp_path):
    """What is behind a # is to Iceberg which part of the table is meant."""
    with pytest.raises(LakeError, match="its path contains a #"):
        folder.check(tmp_path / "lake#1" / "lake")


def test_a_lake_folder_that_is_somebody_elses(tmp_path):
    assert folder.check(tmp_path / "new" / "lake")
    assert not (tmp_path / "new").exists()
    assert folder.check(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(LakeError, match="holds no lake"):
        folder.check(tmp_path)
    with pytest.raises(LakeError, match="not a folder"):
        folder.check(tmp_path / "mine")
    (tmp_path / "_tuskline").mkdir()
    assert folder.check(tmp_path)


def test_one_table_is_no_plural():
    assert [counted(n, "table") for n in (0, 1, 2)] == ["0 tables", "1 table", "2 tables"]


def test_names_in_repairs_are_quoted():
    text = fix("fix/identity", table='odd"schema.Table; DROP TABLE x')
    assert text == 'ALTER TABLE "odd""schema"."Table; DROP TABLE x" REPLICA IDENTITY FULL;'


def test_36_disks_smaller_than_what_a_laggard_may_miss_are_told_of(tmp_path):
    mib = 1 << 20
    there = {"safekeeper-1": tmp_path / "not" / "yet"}
    (fits,) = machine.laggard_room(there, None, 0, mib)
    assert fits.severity is Severity.OK
    (limited,) = machine.laggard_room(there, 64 * mib, 0, 65 * mib)
    assert limited.severity is Severity.WARNING
    assert "max_laggard_bytes" in limited.repair
    (small,) = machine.laggard_room(there, None, 1 << 60, mib)
    assert small.severity is Severity.WARNING
