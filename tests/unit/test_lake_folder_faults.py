"""A lake's folder that cannot be read, or whose disks are full: one sentence everywhere, and no traceback."""

from pathlib import Path

import pytest

from tests.support.parts_config import configuration
from walsender_bridge.cli import lake_run
from walsender_bridge.config import load_config
from walsender_bridge.doctor import parts as doctor_parts
from walsender_bridge.errors import Cause, LakeError, TusklineError, UnavailableError
from walsender_bridge.observability import lake_status
from walsender_bridge.observability.observation import Observer


@pytest.fixture
def settings(tmp_path: Path):
    return load_config(configuration(tmp_path, lake=True))


def test_a_file_in_place_of_the_lake_is_one_error_and_no_traceback(settings) -> None:
    Path(settings.lake.uri).write_text("a file")
    with Observer(settings) as observer:
        seen = observer.observe()
    assert isinstance(seen.errors["lake"], TusklineError)
    assert "the lake cannot be read: Not a directory" in seen.errors["lake"].what
    assert any("the lake cannot be read" in word for word in seen.problems)
    # The folder itself is named by the check of this machine.
    assert [*doctor_parts.of_lake(settings, "log")] == []


def test_a_scratch_disk_without_room_is_named_before_spark_starts(settings, monkeypatch) -> None:
    monkeypatch.setattr(lake_run, "SCRATCH_BYTES", 1 << 62)
    monkeypatch.setattr(lake_run, "_drive", lambda _: pytest.fail("Spark was started"))
    with pytest.raises(TusklineError, match="Spark begins with") as found:
        lake_run.run(settings)
    assert found.value.cause == Cause.DISK_FULL
    assert found.value.where == str(settings.scratch_dir)
    said = lake_status.problem(settings.run_dir, settings.lake.uri)
    assert said is not None
    assert said.where == str(settings.scratch_dir)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("java.io.IOException: No space left on device"), LakeError),
        (RuntimeError("a bug"), RuntimeError),
    ],
)
def test_what_ends_spark_s_start_is_on_record_for_status(settings, monkeypatch, error, raised):
    def drive(_: object) -> None:
        raise error

    monkeypatch.setattr(lake_run, "_drive", drive)
    with pytest.raises(raised):
        lake_run.run(settings)
    said = lake_status.reported_error(settings.run_dir, 0.0, older_of_a_live_job=True)
    assert said is not None
    assert ("a disk is full" in said.what) == (raised is LakeError)


def test_a_bucket_that_does_not_answer_is_named_before_spark_starts(settings, monkeypatch) -> None:
    monkeypatch.setattr(lake_run, "_drive", lambda _: pytest.fail("Spark was started"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")
    bucket = settings.lake.model_copy(
        update={"uri": "s3://bucket/lake", "endpoint": "http://127.0.0.1:1", "allow_http": True}
    )
    there = settings.model_copy(update={"lake": bucket})
    with pytest.raises(UnavailableError, match="the object store does not answer") as found:
        lake_run.run(there)
    assert found.value.where.startswith("s3://bucket/lake")
