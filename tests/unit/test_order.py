"""The order of a run's files."""

from pathlib import Path

import pytest

from tests.support.order import places


def test_files_that_wait_are_among_those_that_compute_and_the_short_ones_last():
    cluster = [Path(f"tests/cluster/test_{name}.py") for name in "abcd"]
    spark = [Path(f"tests/spark/test_{name}.py") for name in "ab"]
    short = [Path(f"tests/{folder}/test_{folder}.py") for folder in ("fuzz", "unit")]
    found = places([*cluster, short[0], *spark, short[1]])
    assert sorted(found, key=lambda file: found[file]) == [
        *(cluster[0], spark[0], cluster[1], cluster[2], spark[1], cluster[3]),
        *short,
    ]


def test_a_run_has_the_tests_of_a_file_together(pytester: pytest.Pytester):
    for folder, names in {"cluster": "ab", "spark": "ab", "unit": "a"}.items():
        (pytester.path / folder).mkdir()
        for name in names:
            file = pytester.path / folder / f"test_{folder}_{name}.py"
            file.write_text("def test_first(): pass\ndef test_again(): pass\n")
    pytester.makeconftest("from tests.conftest import pytest_collection_modifyitems\n")
    lines = pytester.runpytest_inprocess("--collect-only", "-q").outlines
    ran = [line.split("/")[1] for line in lines if "::" in line]
    files = ["cluster_a", "spark_a", "cluster_b", "spark_b", "unit_a"]
    assert ran == [f"test_{f}.py::test_{test}" for f in files for test in ("first", "again")]
