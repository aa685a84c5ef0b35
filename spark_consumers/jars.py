"""The jars that Spark needs for its table formats, by exact coordinates.

They are resolved once, by Spark's own resolver with whatever repositories Spark is set up to use
(`spark-defaults.conf`, `DEFAULT_ARTIFACT_REPOSITORY`), and kept as files: a session that names files starts
without a network. A set is complete when its folder exists: it is made aside and renamed.

`python -m spark_consumers.jars` fetches them and prints where they are.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

from spark_consumers import java
from walsender_bridge import cache as local_cache
from walsender_bridge.errors import UnavailableError

ICEBERG = "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0"
DELTA = "io.delta:delta-spark_4.1_2.13:4.4.0"
COORDINATES = (ICEBERG, DELTA)

Progress = Callable[[str], None]


def say(text: str) -> None:
    """Progress for a person: one line on standard error."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201  # this is the module's command line


def _target() -> Path:
    key = blake2b("\n".join(COORDINATES).encode(), digest_size=6).hexdigest()
    return local_cache.folder() / "jars" / key


def paths(progress: Progress = say) -> list[Path]:
    """The jar files, fetched first if they are not in the cache yet (about 70 MB).

    Raises `UnavailableError` with the resolver's last lines when they cannot be fetched.
    """
    target = _target()
    if not target.is_dir():
        with local_cache.exclusive(target):
            if not target.is_dir():
                _fetch(target, progress)
    return sorted(target.glob("*.jar"))


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
            raise UnavailableError(
                "Spark's jars could not be fetched:\n    " + "\n    ".join(log[-15:]),
                where=", ".join(COORDINATES),
                repair="check the network or Spark's repository settings, then: "
                f"{Path(sys.executable).name} -m spark_consumers.jars",
            )
        # Spark's own class path comes first, so what it ships already would only be copied about.
        shipped = {_name(each.name) for each in (_spark_home() / "jars").glob("*.jar")}
        complete = ivy / "complete"
        complete.mkdir()
        for jar in jars:
            if _name(jar.name.partition("_")[2]) not in shipped:
                jar.rename(complete / jar.name)
        complete.rename(target)


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
