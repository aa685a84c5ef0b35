"""The log names each cause of failing rounds once, in one line, and that they succeed again."""

from pathlib import Path

from structlog.testing import capture_logs

from spark_consumers.lake.writer.round_failures import RoundFailures
from walsender_bridge.errors import LakeError, TusklineError, UnavailableError

TRACE = "java.lang.IllegalStateException: no block\n" + "\tat org.apache.spark.X(X.java:1)\n" * 60


def test_each_cause_is_one_line_until_it_is_another(tmp_path: Path) -> None:
    now = 100.0
    said: list[TusklineError | None] = []
    failures = RoundFailures(tmp_path, said.append, lambda: now)
    with capture_logs() as lines:
        for _ in range(5):
            failures.failed(RuntimeError(TRACE), 0.2)
        assert [line["failures"] for line in lines] == [1]
        assert "no block" in lines[0]["error"]
        assert not any("\n" in str(value) for value in lines[0].values())
        assert "org.apache.spark.X" in lines[0]["detail"]
        now += 61
        failures.failed(RuntimeError(TRACE), 10.0)
        assert (lines[1]["failures"], "detail" in lines[1]) == (6, False)
        failures.failed(UnavailableError("the log does not answer", repair="start it"), 10.0)
        assert (lines[2]["error"], lines[2]["repair"]) == ("the log does not answer", "start it")
        failures.went_well()
        failures.went_well()
        assert [line["event"] for line in lines[3:]] == ["rounds succeed again"]
    assert all(isinstance(error, TusklineError) for error in said[:-1])
    assert said[-1] is None
    assert len(said) == 8


def test_what_an_earlier_driver_said_is_true_until_a_round_has_gone_well(tmp_path: Path) -> None:
    said: list[TusklineError | None] = []
    failures = RoundFailures(tmp_path, said.append)
    assert said == []
    failures.ended(LakeError("it is the lake of another log"))
    again = RoundFailures(tmp_path, said.append)
    assert len(said) == 1
    again.went_well()
    assert said[1:] == [None]


def test_that_rounds_go_well_is_said_again_for_one_that_hangs_says_nothing(tmp_path: Path) -> None:
    now = 100.0
    said: list[TusklineError | None] = []
    failures = RoundFailures(tmp_path, said.append, lambda: now)
    failures.went_well()
    now += 4
    failures.went_well()
    assert said == [None]
    now += 2
    failures.went_well()
    assert said == [None, None]


def test_what_is_not_well_while_rounds_succeed_is_told(tmp_path: Path) -> None:
    now = 100.0
    said: list[TusklineError | None] = []
    failures = RoundFailures(tmp_path, said.append, lambda: now)
    unseen = UnavailableError("its tables have not been compared with the server's catalog")
    failures.went_well()
    now += 6
    failures.went_well(unseen)
    now += 6
    failures.went_well()
    assert said == [None, unseen, None]
