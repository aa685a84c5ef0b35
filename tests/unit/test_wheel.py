"""What is shipped: the sources that Spark finds at the top level, and the SQL texts."""

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
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


def test_the_sdist_holds_what_the_wheel_is_built_from(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (made,) = tmp_path.glob("tuskline-*.tar.gz")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    modules = ("pyspark_tuskline", "pyspark_tuskline_snapshot", "tuskline")
    assert names >= {f"spark_consumers/discovery/{each}/__init__.py" for each in modules}
    assert names >= {"pyproject.toml", "slot_sync/__init__.py", "walsender_bridge/__init__.py"}


def test_what_the_wheel_holds(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {
        "pyspark_tuskline",
        "pyspark_tuskline_snapshot",
        "slot_sync",
        "spark_consumers",
        "tuskline",
        "walsender_bridge",
    }
    assert not any("discovery" in name for name in names)
    for package in ("slot_sync", "spark_consumers", "tuskline", "walsender_bridge"):
        assert f"{package}/py.typed" in names
    shipped = {name.partition("/sql_texts/")[2] for name in names if "/sql_texts/" in name}
    assert shipped >= {
        str(path.relative_to(ROOT / "sql")) for path in (ROOT / "sql").rglob("*.sql")
    }


def test_what_runs_from_the_wheel(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)  # noqa: S202  # a wheel of our own
    code = (
        "import pkgutil, tuskline, walsender_bridge.runtime.sql as s\n"
        "found = {m.name for m in pkgutil.iter_modules() if m.name.startswith('pyspark_')}\n"
        "print(tuskline.__version__, tuskline.__file__, tuskline.read.__module__)\n"
        "print(s.folder(), s.load('flush/send')[:0], *sorted(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    front, line = done.stdout.splitlines()
    assert front.split()[:2] == [
        metadata.version("tuskline"),
        str(tmp_path / "tuskline" / "__init__.py"),
    ]
    folder, *found = line.split()
    assert folder == str(tmp_path / "walsender_bridge" / "sql_texts")
    assert found == ["pyspark_tuskline", "pyspark_tuskline_snapshot"]


#: What runs in tasks, and what Spark loads on executors.
ON_EXECUTORS = (
    "spark_consumers.spark.daemon",
    "spark_consumers.sources.snapshot",
    "spark_consumers.sources.changes",
    "spark_consumers.lake.epoch.complete",
    "spark_consumers.lake.copy.initial_copy",
    "spark_consumers.lake.epoch.stage",
)
_OURS = {"pyspark_tuskline", "pyspark_tuskline_snapshot", "spark_consumers", "walsender_bridge"}


def imports(module):
    """What a module of ours imports anywhere in it, also inside functions, but for types."""
    path = ROOT / Path(*module.split("."))
    tree = ast.parse(
        (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    )
    typing_only = [
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    ]
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            submodules = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name for name in submodules if is_module(name))


def is_module(name):
    path = ROOT / Path(*name.split("."))
    return name.split(".")[0] in _OURS and (path.with_suffix(".py").exists() or path.is_dir())


def test_the_distribution_alone_is_what_executors_import():
    seen: set[str] = set()
    waiting, foreign = [*ON_EXECUTORS], dict[str, str]()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        for name in imports(module):
            if name.split(".")[0] in _OURS:
                waiting.append(name)
            elif name.split(".")[0] not in sys.stdlib_module_names:
                foreign.setdefault(name.split(".")[0], module)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [re.split(r"[^\w-]", each)[0] for each in project["dependencies"]]
    # ADBC's driver needs its manager. Spark brings PySpark. A lake in a bucket needs the extra `s3`.
    known = {*needed, "adbc-driver-manager", "pyspark", "pyspark-client", "obstore"}
    found = metadata.packages_distributions()
    missing = {
        name: module for name, module in foreign.items() if not known & set(found.get(name, [name]))
    }
    assert not missing
    assert "adbc_driver_postgresql" in foreign
