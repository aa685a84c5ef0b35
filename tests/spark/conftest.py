"""What all tests with Spark need."""

from pathlib import Path

import pytest

from tests.support.lake_pipeline import TABLES, Pipeline

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """PySpark leaves the socket of each `collect` to the garbage collector, which warns of it."""
    ignore = r"ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(ignore))


@pytest.fixture
def pipeline(spark, tmp_path, database):
    database.execute(*TABLES)
    with Pipeline(spark, tmp_path, database) as running:
        running.wait_for_tables("docs", "pairs", "bag")
        yield running
