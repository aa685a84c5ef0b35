"""By which format tests read the lake's tables: by Iceberg, or by Delta, whose logs are beside Iceberg's metadata then.

A test marked `both_formats` runs by both. With `--delta` so does each test of `tests/spark` whose name begins with one of `NUMBERS`, but those
marked `iceberg_only`. By Delta, every `read` of the test that names no format is Delta's, every `Lakehouse` has `delta=True`, and so has the
configuration of every process that the test starts; a test that reads nothing by Delta then fails, as it would show nothing.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

ICEBERG, DELTA = "iceberg", "delta"
#: Numbers of epochs, folding and schema (docs/invariants.md), views, and what was found beside them.
NUMBERS = frozenset({*range(1, 16), 22, *range(24, 33), 34, 35, 38})
#: Which one is in use, for the processes of a test.
_VARIABLE = "TUSKLINE_TEST_FORMAT"


def add_options(parser: pytest.Parser) -> None:
    """The option `--delta`."""
    parser.getgroup("tuskline").addoption(
        "--delta", action="store_true", help="run the lake's numbered tests by Delta, too"
    )


def runs_by_both(metafunc: pytest.Metafunc) -> bool:
    """Whether this test of `tests/spark` runs by both formats."""
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    if "iceberg_only" in marks:
        return False
    numbers = re.match(r"test_((?:\d+_)*)", metafunc.function.__name__)
    has_number = numbers is not None and not NUMBERS.isdisjoint(
        int(each) for each in numbers[1].split("_") if each
    )
    return "both_formats" in marks or (has_number and metafunc.config.getoption("--delta"))


def chosen() -> str:
    """The format in use."""
    return os.environ.get(_VARIABLE, ICEBERG)


def section() -> str:
    """The lines of section `[lake]` for the format in use."""
    return "delta = true\n" if chosen() == DELTA else ""


def use_in_this_process() -> None:
    """In a process of a test that reads: by the format in use there."""
    if chosen() == DELTA:
        _by_delta(dict.__setitem__)


@contextmanager
def reading_by(kind: str) -> Iterator[None]:
    """What reads meanwhile reads by this format."""
    if kind == ICEBERG:
        yield
        return
    from spark_consumers.lake.delta_log import read as delta_read

    opened = []
    version_of = delta_read.version_of

    def counted(*given: Any) -> int:
        opened.append(given)
        return version_of(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_VARIABLE, DELTA)
        patch.setattr(delta_read, "version_of", counted)
        _by_delta(patch.setitem)
        yield
    assert opened, "nothing was read by Delta"


def _by_delta(set_item: Callable[[Any, str, Any], None]) -> None:
    from spark_consumers import Lakehouse, read

    for function, name, value in ((read, "format", DELTA), (Lakehouse.__init__, "delta", True)):
        defaults = function.__kwdefaults__
        assert defaults is not None
        assert name in defaults
        set_item(defaults, name, value)
