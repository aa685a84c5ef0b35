"""Every key of `[lake]` reaches the driver's session or its lakehouse."""

import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_consumers.lake.store.lake_store import StoreOptions
from spark_consumers.lake.views.definition import ViewDefinition
from spark_consumers.lake.writer import pipeline
from spark_consumers.spark import session
from spark_consumers.spark.lake_catalog import LakeCatalog
from walsender_bridge.cli import lake_run
from walsender_bridge.config import load_config
from walsender_bridge.config.sections import LakeSection
from walsender_bridge.postgres.column_masks import ColumnMask
from walsender_bridge.postgres.table_layout import LayoutRule, TableLayout
from walsender_bridge.postgres.table_patterns import Pattern

#: None of them is the default. `uri` and `spark_master` are the session's, too.
KEYS = {
    "format": "iceberg",
    "delta": True,
    "store": StoreOptions("http://127.0.0.1:9000", "north", allow_http=True),
    "epoch_interval": 3.0,
    "retention": 77.0,
    "failing_table": "hold",
    "copy_rate": 5e6,
    "copy_chunk_bytes": 3 << 20,
    "on_unrepresentable_value": {"default": "quarantine", "shop.public.orders": "fail"},
    "deletes": {"shop.public.orders": "copy-on-write"},
    "catalog": LakeCatalog("https://catalog:8181", "company", ("shop", "lake")),
    "tables": [
        LayoutRule(
            Pattern.parse("public.orders*"),
            TableLayout.parse(["day(at)"], ["id desc"], {"team": "shop"}),
            "shop",
            (ColumnMask("email", "hash"), ColumnMask("note", "constant", "x")),
            delta=False,
        )
    ],
    "view": [
        ViewDefinition("views.open", "SELECT id FROM orders"),
        ViewDefinition("reports.all", "SELECT * FROM orders"),
    ],
    "mask_key_file": b"k" * 40,
}
NAMES = {
    "retention": "retention_seconds",
    "tables": "layouts",
    "catalog": "rest",
    "view": "views",
    "mask_key_file": "mask_key",
}


def test_the_lakehouse_is_made_as_the_configuration_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = {"endpoint", "region", "allow_http"}
    # The maintainer has a test of its own (`test_lake_maintenance`).
    others = {*bucket, "uri", "spark_master", "maintenance"}
    assert {*KEYS, *others} - {"store"} == set(LakeSection.model_fields)
    config = tmp_path / "tuskline.toml"
    key = tmp_path / "mask.key"
    key.touch(0o600)
    key.write_text("k" * 40 + "\n")
    config.write_text(
        f"""
[log]
data_dir = "{tmp_path}/data"
[[log_server]]
listen = "127.0.0.1:7711"
data_dir = "{tmp_path}/log-server"
[[source]]
name = "shop"
dsn = "postgresql://127.0.0.1/shop"
[lake]
uri = "{tmp_path}/lake"
endpoint = "http://127.0.0.1:9000"
region = "north"
allow_http = true
format = "iceberg"
delta = true
epoch_interval = 3.0
retention = 77.0
failing_table = "hold"
copy_rate = 5e6
copy_chunk_bytes = 3145728
spark_master = "local[7]"
mask_key_file = "mask.key"
on_unrepresentable_value = {{ default = "quarantine", "shop.public.orders" = "fail" }}
deletes = {{ "shop.public.orders" = "copy-on-write" }}
[lake.catalog]
type = "rest"
uri = "https://catalog:8181"
warehouse = "company"
namespace = "shop.lake"
[[lake.tables]]
source = "shop"
pattern = "public.orders*"
partition = ["day(at)"]
sort = ["id desc"]
options = {{ team = "shop" }}
mask = {{ email = "hash", note = {{ constant = "x" }} }}
delta = false
[[lake.view]]
name = "open"
sql = "SELECT id FROM orders"
[[lake.view]]
name = "reports.all"
file = "all.sql"
"""
    )
    (tmp_path / "all.sql").write_text("SELECT * FROM orders")
    made: dict[str, Any] = {}

    def lakehouse(_spark: Any, uri: str, *_: Any, **given: Any) -> Any:
        made.update(given, uri=uri)
        return SimpleNamespace(run=lambda _stop: None, is_writer=False)

    def begun(_name: str, master: str, **given: Any) -> Any:
        made.update(spark_master=master, session_lake=given["lake"])
        return SimpleNamespace(stop=lambda: None)

    monkeypatch.setattr(pipeline, "Lakehouse", lakehouse)
    monkeypatch.setattr(session, "session", begun)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    lake_run._drive(load_config(config))
    assert {key: made[NAMES.get(key, key)] for key in KEYS} == KEYS
    uri = f"{tmp_path}/lake"
    assert (made["uri"], made["session_lake"], made["spark_master"]) == (uri, uri, "local[7]")
