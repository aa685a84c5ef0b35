"""A run that was stopped goes on."""

import pytest

from tests.support.resume import Resume

_FILE = """
import pytest
def test_passes(): pass
def test_fails(): assert False
"""


def test_what_passed_is_not_run_again_and_what_failed_is(pytester: pytest.Pytester):
    record = pytester.path / "record.jsonl"
    pytester.makepyfile(_FILE)
    pytester.inline_run(plugins=[Resume(record)]).assertoutcome(passed=1, failed=1)
    pytester.inline_run(plugins=[Resume(record)]).assertoutcome(passed=0, failed=1)


def test_a_run_with_nothing_left_is_a_success(pytester: pytest.Pytester):
    record = pytester.path / "record.jsonl"
    pytester.makepyfile("def test_passes(): pass")
    pytester.inline_run(plugins=[Resume(record)]).assertoutcome(passed=1)
    again = pytester.inline_run(plugins=[Resume(record)])
    again.assertoutcome(passed=0)
    assert again.ret == pytest.ExitCode.OK


def test_a_record_that_was_cut_off_counts_up_to_there(pytester):
    """The disk was full, or the machine went down, in the middle of a line."""
    record = pytester.path / "seed-1.jsonl"
    pytester.makepyfile("def test_one(): pass\ndef test_two(): pass")
    pytester.inline_run(plugins=[Resume(record)]).assertoutcome(passed=2)
    record.write_text(record.read_text()[:-9])
    pytester.inline_run(plugins=[Resume(record)]).assertoutcome(passed=1)
    pytester.inline_run(plugins=[Resume(record)]).assertoutcome(passed=0)
