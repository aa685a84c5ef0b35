"""What a user has set for Spark before a session begins, where Spark itself looks for it.

In Spark's own order, the first one wins: PYSPARK_SUBMIT_ARGS (its flags and `--conf`), the file of its `--properties-file`, and
`spark-defaults.conf` in SPARK_CONF_DIR or below SPARK_HOME. Spark reads them when its JVM starts; they are read here before,
because a default of ours that is handed to the JVM would win over them.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

#: The settings that have flags of their own in spark-submit.
_FLAGS: Final = {
    "--archives": "spark.archives",
    "--deploy-mode": "spark.submit.deployMode",
    "--driver-class-path": "spark.driver.extraClassPath",
    "--driver-cores": "spark.driver.cores",
    "--driver-java-options": "spark.driver.extraJavaOptions",
    "--driver-library-path": "spark.driver.extraLibraryPath",
    "--driver-memory": "spark.driver.memory",
    "--executor-cores": "spark.executor.cores",
    "--executor-memory": "spark.executor.memory",
    "--files": "spark.files",
    "--jars": "spark.jars",
    "--master": "spark.master",
    "--name": "spark.app.name",
    "--num-executors": "spark.executor.instances",
    "--packages": "spark.jars.packages",
    "--py-files": "spark.submit.pyFiles",
    "--queue": "spark.yarn.queue",
    "--repositories": "spark.jars.repositories",
    "--total-executor-cores": "spark.cores.max",
}
_PROPERTIES, _DEFAULTS_TOO = "--properties-file", "--load-spark-defaults"


def given(environment: Mapping[str, str], spark_home: Path) -> dict[str, str]:
    """The settings of this environment. `spark_home` is Spark's folder where SPARK_HOME names none."""
    words = shlex.split(environment.get("PYSPARK_SUBMIT_ARGS", ""))
    submitted, files = submit_arguments(words), []
    if file := submitted.pop(_PROPERTIES, None):
        files.append(Path(file))
    if file is None or _DEFAULTS_TOO in words:
        home = Path(environment.get("SPARK_HOME") or spark_home)
        folder = Path(environment.get("SPARK_CONF_DIR") or home / "conf")
        files.append(folder / "spark-defaults.conf")
    found: dict[str, str] = {}
    for place in reversed(files):
        if place.is_file():
            found |= properties(place.read_text(errors="replace"))
    return found | submitted


def submit_arguments(words: list[str]) -> dict[str, str]:
    """The settings in these arguments of spark-submit; that of its properties file by the flag's own name."""
    conf: dict[str, str] = {}
    flags: dict[str, str] = {}
    left = iter(_separated(words))
    for word in left:
        if word in {"--conf", "-c"}:
            key, _, value = next(left, "").partition("=")
            conf[key] = value
        elif word in _FLAGS:
            flags[_FLAGS[word]] = next(left, "")
        elif word == _PROPERTIES:
            flags[word] = next(left, "")
    # As spark-submit has it: a flag wins over `--conf`, and the later of two.
    return {key: value for key, value in (conf | flags).items() if key}


def _separated(words: list[str]) -> Iterator[str]:
    """`--flag=value` as two words."""
    for word in words:
        flag, equals, value = word.partition("=")
        if equals and flag in {*_FLAGS, _PROPERTIES, "--conf", "-c"}:
            yield from (flag, value)
        else:
            yield word


def with_jars(arguments: str, jars: str) -> str:
    """These arguments, with these jars if they have the flag `--jars`, which wins over the setting `spark.jars`."""
    words = shlex.split(arguments)
    if not words or not any(word == "--jars" for word in _separated(words)):
        return arguments
    # The last word is what is to be run; of two flags the later one counts.
    return shlex.join([*words[:-1], "--jars", jars, words[-1]])


def properties(text: str) -> dict[str, str]:
    """The settings in a file of Java properties, as `spark-defaults.conf` is one.

    Escapes other than a line that is continued stay as they are: no setting that is read here has any.
    """
    found = {}
    for line in re.sub(r"\\\n[ \t]*", "", text).splitlines():
        line = line.strip()  # noqa: PLW2901  # the line is of no use with its blanks
        if line and line[0] not in "#!":
            key, *value = re.split(r"\s*[=:\s]\s*", line, maxsplit=1)
            found[key] = value[0] if value else ""
    return found


def here() -> dict[str, str]:
    """The settings for a session of this process."""
    import pyspark

    return given(os.environ, Path(pyspark.__path__[0]))
