"""What all tests with Spark need."""

from pathlib import Path

import pytest

from tests.support import table_format as formats
from tests.support.lake_pipeline import TABLES, Pipeline

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """PySpark leaves the socket of each `collect` to the garbage collector, which warns of it."""
    ignore = r"ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(ignore))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if formats.runs_by_both(metafunc):
        metafunc.parametrize("table_format", [formats.ICEBERG, formats.DELTA], indirect=True)


@pytest.fixture(autouse=True)
def table_format(request):
    """By which format the test reads."""
    kind = getattr(request, "param", formats.ICEBERG)
    with formats.reading_by(kind):
        yield kind


@pytest.fixture
def pipeline(spark, tmp_path, database):
    database.execute(*TABLES)
    with Pipeline(spark, tmp_path, database) as running:
        running.wait_for_tables("docs", "pairs", "bag")
        yield running
