"""How Spark is told to reach a bucket: by the options, or else by the environment, and never with keys."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from spark_consumers.spark import buckets, executors
from walsender_bridge.demo.bucket import FOLDER, PORT, S3, environment, lake_place
from walsender_bridge.demo.catalog import URI, section
from walsender_bridge.errors import UnavailableError, UsageError

LAKE = "s3://company-lake/shop"
OWN = "fs.s3a.bucket.company-lake"


@pytest.fixture(autouse=True)
def _nothing_is_said(monkeypatch):
    for name in ("ENDPOINT_URL", "ENDPOINT_URL_S3", "REGION", "DEFAULT_REGION"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)


def test_a_bucket_is_reached_as_the_options_say(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://other")
    found = buckets.settings(LAKE, "https://minio:9000", "here")
    assert found[f"{OWN}.endpoint"] == "https://minio:9000"
    assert found[f"{OWN}.path.style.access"] == "true"
    assert found[f"{OWN}.endpoint.region"] == "here"
    assert found["fs.s3.impl"] == "org.apache.hadoop.fs.s3a.S3AFileSystem"


def test_what_the_options_leave_open_the_environment_says(monkeypatch):
    assert f"{OWN}.endpoint" not in buckets.settings(LAKE, None, None)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://other")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "there")
    found = buckets.settings(LAKE, None, None)
    assert found[f"{OWN}.endpoint"] == "https://other"
    assert found[f"{OWN}.endpoint.region"] == "there"


def test_no_setting_has_a_key_and_a_folder_has_no_settings(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    found = buckets.of_started(buckets.settings(LAKE, "https://minio", None))
    assert all(name.startswith(("spark.hadoop.fs.s3", "spark.hadoop.parquet.")) for name in found)
    assert not [value for value in found.values() if value in {"me", "a-secret"}]
    assert buckets.settings("/srv/lake", "https://minio", None) == {}
    assert not buckets.is_bucket(None)


class Conf:
    """Of a session that runs."""

    def __init__(self, known: dict[str, str]) -> None:
        self.known = known

    def get(self, name: str, default: Any) -> Any:
        return self.known.get(name, default)

    def set(self, name: str, value: str) -> None:
        self.known[name] = value


def test_what_a_session_was_started_with_is_kept():
    conf = Conf({f"spark.hadoop.{OWN}.endpoint": "https://mine"})
    buckets.use(SimpleNamespace(conf=conf), LAKE, "https://mine", None)
    assert f"{OWN}.endpoint" not in conf.known
    assert conf.known[f"{OWN}.path.style.access"] == "true"
    # Hadoop has one client for a bucket's name, and would go on asking the first one.
    with pytest.raises(UsageError, match="not https://minio"):
        buckets.use(SimpleNamespace(conf=conf), LAKE, "https://minio", None)


def test_the_demo_names_what_is_missing_for_a_bucket(monkeypatch, tmp_path):
    monkeypatch.setattr("walsender_bridge.demo.bucket.program", lambda: None)
    with pytest.raises(UnavailableError, match="versitygw"), lake_place("s3", tmp_path):
        pass
    with pytest.raises(UsageError, match="no place for a lake"), lake_place("hdfs", tmp_path):
        pass
    with lake_place(LAKE, tmp_path) as found:
        assert found.uri == LAKE
    with lake_place(FOLDER, tmp_path) as found:
        assert found.uri == str(tmp_path / "lake")


def test_the_demo_has_a_catalog_told_where_its_bucket_is(monkeypatch):
    monkeypatch.setenv(URI, "http://127.0.0.1:8181")
    monkeypatch.delenv(PORT, raising=False)
    assert 'type = "rest"' in section("rest", LAKE)
    with pytest.raises(UsageError, match=rf"(?s)does not know the bucket.*set {PORT}"):
        section("rest", S3)
    monkeypatch.setenv(PORT, "9000")
    assert "allow_http = true" in section("rest", S3)
    monkeypatch.setenv(PORT, "s3")
    with pytest.raises(UsageError, match="'s3' is not a port"):
        section("rest", S3)


def test_the_demo_s_server_is_forgotten_at_its_end(monkeypatch):
    monkeypatch.setenv("AWS_REGION", "mine")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    with environment(9):
        assert buckets.settings(LAKE, None, None)[f"{OWN}.endpoint"] == "http://127.0.0.1:9"
    assert buckets.settings(LAKE, None, None)[f"{OWN}.endpoint.region"] == "mine"


def test_executors_of_a_lake_in_a_bucket_need_its_client():
    driver = executors.here(LAKE)
    assert driver.lake is None
    without = tuple((n, None if n == "obstore" else v) for n, v in driver.packages)
    (error,) = executors.lacking(driver, [driver, replace(driver, packages=without)])
    assert "obstore is not installed" in error.what
    assert "tuskline[s3]" in (error.repair or "")
    assert "obstore" not in dict(executors.here("/srv/lake").packages)
