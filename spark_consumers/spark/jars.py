"""The jars that Spark needs for its table formats, by exact coordinates.

They are resolved once, by Spark's own resolver with whatever repositories Spark is set up to use
(`spark-defaults.conf`, `DEFAULT_ARTIFACT_REPOSITORY`), and kept as files: a session that names files starts
without a network. A set is complete when its folder exists: it is made aside and renamed. Whatever the
repository served, only jars with the SHA-256 that is written here become part of it.

`python -m spark_consumers.spark.jars` fetches them and prints where they are.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from hashlib import blake2b, sha256
from pathlib import Path

from spark_consumers.spark import java
from walsender_bridge.errors import CorruptError, UnavailableError
from walsender_bridge.runtime import cache as local_cache

ICEBERG = "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0"
DELTA = "io.delta:delta-spark_4.1_2.13:4.4.0"
COORDINATES = (ICEBERG, DELTA)
#: The SHA-256 of each jar that is kept, by the name that Spark's resolver gives it.
SHA256 = {
    "com.fasterxml.jackson.datatype_jackson-datatype-jdk8-2.13.5.jar": (
        "e58761751fea8a00dc626aae1c5f1be38c5cfd487aeb333d933a4ab5f5a73c55"
    ),
    "commons-logging_commons-logging-1.3.0.jar": (
        "66d3c980470b99b0c511dad3dfc0ae7b265ec1fb144e96bc0253a8a175fd34d9"
    ),
    "io.delta_delta-kernel-api-4.4.0.jar": (
        "ee9b5a14ac3b7efdff4d61a58478fe8eb0e5a3fbca43889dca7290795fe79a11"
    ),
    "io.delta_delta-kernel-defaults-4.4.0.jar": (
        "225c975199e4718b38ee5b7e6da7f19e9585024262b2cec2656b32151a856b0b"
    ),
    "io.delta_delta-kernel-unitycatalog-4.4.0.jar": (
        "cea22dfb4ac562b3cd27bf652697750e8336009d73fb06631363aaaad5345ffa"
    ),
    "io.delta_delta-spark_4.1_2.13-4.4.0.jar": (
        "75a9400986853c061f5109f012547de2545a5759e5e752e5ef633dabe16a4f10"
    ),
    "io.delta_delta-storage-4.4.0.jar": (
        "c46735481fa8e326b0957be02b4420cbcab4b325bb08009b7f2045a95133f1cc"
    ),
    "io.unitycatalog_unitycatalog-client-0.6.0.jar": (
        "48257499a86b801a3e2372cec55ac226ca1c1c7eabe5c118e7302f29a1fdbc19"
    ),
    "io.unitycatalog_unitycatalog-hadoop-0.6.0.jar": (
        "c47b63c961c87102b9e1d63809a0915ba4c86b7652f57c8d39ca3a05b441a150"
    ),
    "javax.annotation_javax.annotation-api-1.3.2.jar": (
        "e04ba5195bcd555dc95650f7cc614d151e4bcd52d29a10b8aa2197f3ab89ab9b"
    ),
    "org.apache.iceberg_iceberg-spark-runtime-4.1_2.13-1.12.0.jar": (
        "3123c3798af642dd537230923548e013ef41cc28b6626e5225808cf5670a0f82"
    ),
    "org.roaringbitmap_shims-0.9.25.jar": (
        "0b82ed6cb1caf0706304b42358d568eb6faf190eadea7f2b2d365cb63156b40d"
    ),
}

#: Lines of the resolver that are shown when it fails.
_LAST = 15

Progress = Callable[[str], None]


def print_progress(text: str) -> None:
    """Progress for a person: one line on standard error."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201  # this is the module's command line


def _target() -> Path:
    key = blake2b("\n".join(COORDINATES).encode(), digest_size=6).hexdigest()
    return local_cache.folder() / "jars" / key


def kept() -> list[Path]:
    """The jar files that are in the cache; none before they were fetched."""
    return sorted(_target().glob("*.jar"))


def paths(progress: Progress = print_progress) -> list[Path]:
    """The jar files, fetched first if they are not in the cache yet (about 70 MB).

    Raises `UnavailableError` when they cannot be fetched, after `progress` has had the resolver's last lines, and
    `CorruptError` for another jar than the pinned one.
    """
    target = _target()
    if not target.is_dir():
        with local_cache.exclusive(target):
            if not target.is_dir():
                _fetch(target, progress)
    return kept()


def _fetch(target: Path, progress: Progress) -> None:
    progress(f"Spark: fetching {', '.join(COORDINATES)}")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".ivy-") as scratch:
        ivy = Path(scratch)
        nothing = ivy / "nothing.py"
        nothing.touch()
        log: list[str] = []
        for line in _resolve(ivy, nothing):
            log.append(line)
            if found := re.search(r"downloading .*/([^/\s]+\.jar)", line):
                progress(f"  {found[1]}")
        jars = sorted((ivy / "jars").glob("*.jar"))
        if not all(any(_artifact(each) in jar.name for jar in jars) for each in COORDINATES):
            for line in log[-_LAST:]:
                progress(f"  {line}")
            raise UnavailableError(
                "could not fetch Spark's jars",
                where=", ".join(COORDINATES),
                repair="check the network and Spark's repository settings; "
                f"`{Path(sys.executable).name} -m spark_consumers.spark.jars` tries again, and prints the resolver's lines",
            )
        # Spark's own class path comes first, so what it ships already would only be copied about.
        shipped = {_name(each.name) for each in (_spark_home() / "jars").glob("*.jar")}
        complete = ivy / "complete"
        complete.mkdir()
        for jar in jars:
            if _name(jar.name.partition("_")[2]) not in shipped:
                jar.rename(complete / jar.name)
        check(complete)
        complete.rename(target)


def check(folder: Path) -> None:
    """Raise `CorruptError` if the folder holds another jar than those that are pinned."""
    found = {jar.name: sha256(jar.read_bytes()).hexdigest() for jar in folder.glob("*.jar")}
    for name, digest in sorted(found.items()):
        if SHA256.get(name) != digest:
            raise CorruptError(
                f"{name} has SHA-256 {digest}, not {SHA256.get(name, 'that of any pinned jar')}",
                where=", ".join(COORDINATES),
                repair="check which repository Spark is configured to use, and what it serves",
            )


def _artifact(coordinate: str) -> str:
    group, name, version = coordinate.split(":")
    return f"{group}_{name}-{version}"


def _name(jar: str) -> str:
    """`delta-storage` of `delta-storage-4.4.0.jar`."""
    return re.split(r"-(?=\d)", jar, maxsplit=1)[0]


def _spark_home() -> Path:
    import pyspark

    return Path(pyspark.__file__).parent


def _resolve(ivy: Path, script: Path) -> Iterator[str]:
    """Run Spark's resolver into `ivy`; yields its lines. `script` is the empty program that it starts."""
    home = _spark_home()
    command = [
        str(home / "bin" / "spark-submit"),
        *("--master", "local[1]"),
        *("--packages", ",".join(COORDINATES)),
        *("--conf", f"spark.jars.ivy={ivy}"),
        str(script),
    ]
    environment = os.environ | {
        "JAVA_HOME": str(java.find().home),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield line.rstrip()


def main() -> None:
    """Fetch the jars and print their paths."""
    for jar in paths():
        print(jar)  # noqa: T201  # the command's result


if __name__ == "__main__":
    main()
