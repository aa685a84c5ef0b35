"""What Spark raises where a call of it fails, in a session with a JVM of its own and in one of Spark Connect."""

from typing import Final

from pyspark.errors import PySparkException


def _errors() -> tuple[type[Exception], ...]:
    try:
        from py4j.protocol import Py4JJavaError
    except ImportError:
        # The package pyspark-client has no JVM to call.
        return (PySparkException,)
    return (PySparkException, Py4JJavaError)


SPARK_ERRORS: Final = _errors()


def line_of(error: Exception) -> str:
    """The line of what Spark raises that has the reason: with a JVM of its own, the first one names only the call."""
    text = str(error)
    known = ("Exception: ", "Error: ")
    lines = text.splitlines()
    line = next((li for li in lines if any(word in li for word in known)), text.partition("\n")[0])
    return line.strip(": ")[:300]
