"""What Spark's Python workers begin with."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from spark_consumers.spark.daemon import without_archives


def _archive(place: Path) -> str:
    place.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(place, "w") as archive:
        archive.writestr("pyspark/__init__.py", "")
    return str(place)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages with PySpark in it."""
    package = tmp_path / "site" / "pyspark"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    return package.parent


def test_the_archives_of_the_package_that_is_there_go(site: Path) -> None:
    own = _archive(site / "pyspark" / "python" / "lib" / "pyspark.zip")
    jar = _archive(site / "pyspark" / "jars" / "spark-core.jar")
    assert without_archives(["", own, jar, str(site)]) == ["", str(site)]


def test_another_pyspark_s_archives_and_a_job_s_own_stay(site: Path, tmp_path: Path) -> None:
    path = [_archive(tmp_path / "spark" / "pyspark.zip"), _archive(tmp_path / "my.zip"), str(site)]
    assert without_archives(path) == path


def test_where_no_package_is_nothing_goes(tmp_path: Path) -> None:
    path = [_archive(tmp_path / "pyspark.zip"), str(tmp_path / "nowhere")]
    assert without_archives(path) == path


def test_a_collection_in_a_worker_examines_nothing_that_was_there_before_the_fork() -> None:
    program = (
        "import gc, pyspark.daemon\n"
        "from spark_consumers.spark import daemon\n"
        "pyspark.daemon.manager = lambda: print(gc.isenabled(), len(gc.get_objects()) < 1000)\n"
        "daemon.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["True", "True"]
