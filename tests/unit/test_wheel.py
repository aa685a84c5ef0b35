"""What is shipped: the sources that Spark finds at the top level, and the SQL texts."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (made,) = folder.glob("tuskline-*-py3-none-any.whl")
    return made


def test_what_the_wheel_holds(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {
        "pyspark_tuskline",
        "pyspark_tuskline_snapshot",
        "slot_sync",
        "spark_consumers",
        "walsender_bridge",
    }
    assert not any("discovery" in name for name in names)
    for package in ("slot_sync", "spark_consumers", "walsender_bridge"):
        assert f"{package}/py.typed" in names
    shipped = {name.rpartition("/")[2] for name in names if "/sql_texts/" in name}
    assert shipped >= {path.name for path in (ROOT / "sql").glob("*.sql")}


def test_what_runs_from_the_wheel(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import pkgutil, walsender_bridge.sql as s\n"
        "found = {m.name for m in pkgutil.iter_modules() if m.name.startswith('pyspark_')}\n"
        "print(s.folder(), s.load('flush')[:0], *sorted(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    folder, *found = done.stdout.split()
    assert folder == str(tmp_path / "walsender_bridge" / "sql_texts")
    assert found == ["pyspark_tuskline", "pyspark_tuskline_snapshot"]
