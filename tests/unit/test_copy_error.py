"""What is said of a copy that failed: in the words of the executor that met it, and with the ways out."""

import pytest

from spark_consumers.lake.copy.bootstrap import _copy_error
from walsender_bridge.errors import TusklineError, UnavailableError, UnsupportedValueError

NAME = "shop.public.prices"
#: As PySpark words it: what the executor raised lies between two stack traces.
SPARK = """An error occurred while calling o1.collect.
: org.apache.spark.SparkException: Job aborted due to stage failure
Traceback (most recent call last):
  File "worker.py", line 1, in main
{}
HINT:  none

\tat org.apache.spark.api.python.BasePythonRunner.run(PythonRunner.scala:1)
"""


@pytest.mark.parametrize(
    ("line", "kind", "what", "ways"),
    [
        (
            "walsender_bridge.errors.UnsupportedValueError: public.prices.price, row 2: 'NaN' is not in decimal",
            UnsupportedValueError,
            "public.prices.price, row 2: 'NaN' is not in decimal",
            (
                "change the value at the source",
                f'[lake.on_unrepresentable_value] "{NAME}" = "quarantine"',
            ),
        ),
        (
            "walsender_bridge.errors.SnapshotError: the snapshot is gone",
            UnavailableError,
            "the snapshot is gone",
            (),
        ),
        (
            "java.io.IOException: No space left on device",
            UnavailableError,
            "java.io.IOException: No space left on device",
            (),
        ),
    ],
)
def test_the_cause_is_what_the_executor_met(
    line: str, kind: type[TusklineError], what: str, ways: tuple[str, ...]
) -> None:
    found = _copy_error(NAME, RuntimeError(SPARK.format(line)))
    assert type(found) is kind
    assert (found.what, found.where) == (what, NAME)
    assert all(way in found.repair for way in ways)
    assert bool(found.repair) == bool(ways)
