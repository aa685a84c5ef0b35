"""`[lake.catalog]`: which catalog a lake's tables are in, what it has to be able to do, and how engines get to it."""

import uuid
from dataclasses import replace

import pytest

from spark_consumers.lake.catalog import open_catalog
from spark_consumers.lake.catalog.rest_catalog import RestCatalog
from spark_consumers.lake.catalog.rest_statements import preamble, statements
from spark_consumers.lake.catalog.statements import DUCKDB, ENGINES, PYICEBERG, SPARK, CutTable
from spark_consumers.lake.catalog.whole_epochs import WholeEpochs
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.policy import without_vectors
from spark_consumers.spark import lake_catalog
from spark_consumers.spark.lake_catalog import CREDENTIAL, RECORD, TOKEN, LakeCatalog
from spark_consumers.spark.session import catalog_settings
from tests.support.lake.controlled import new_snapshot
from tests.support.parts_config import configuration
from tests.support.rest_catalog import CLIENT, SECRET, RestServer
from tests.support.s3 import BUCKET, options_at
from walsender_bridge.config import load_config
from walsender_bridge.demo import catalog as demo_catalog
from walsender_bridge.doctor.finding import Severity
from walsender_bridge.doctor.lake_catalog import of_catalog
from walsender_bridge.errors import (
    Cause,
    ConfigError,
    CorruptError,
    LakeError,
    NotSupportedError,
    UnavailableError,
    UsageError,
)
from walsender_bridge.observability.lake_chain import rest_catalog

PLACE = LakeCatalog("http://127.0.0.1:9/catalog", warehouse="lakes", namespace=("a", "b"))


@pytest.fixture(autouse=True)
def no_secrets(monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.delenv(CREDENTIAL, raising=False)


def configured(folder, lines):
    path = configuration(folder, lake=True)
    path.write_text(f"{path.read_text()}\n{lines}\n")
    return load_config(path)


def of_server(folder, server, more=""):
    lines = f'[lake.catalog]\ntype = "rest"\nuri = "{server.uri}"\nallow_http = true\n{more}'
    return configured(folder, lines)


def test_a_lake_is_in_its_folder_unless_a_catalog_is_configured(tmp_path):
    assert rest_catalog(configured(tmp_path, "").lake) is None
    found = configured(
        tmp_path,
        '[lake.catalog]\ntype = "rest"\nuri = "https://c/x"\nnamespace = "a.b"\ntoken_file = "t"\nca = "/ca"',
    )
    assert rest_catalog(found.lake) == LakeCatalog(
        "https://c/x", namespace=("a", "b"), token_file=str(tmp_path / "t"), ca="/ca"
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('type = "rest"', "a catalog of type rest needs uri"),
        ('uri = "https://c"', "these settings require a catalog of type rest"),
        ('type = "rest"\nuri = "https://me:secret@c"', "without a user"),
        ('type = "rest"\nuri = "https://c"\nnamespace = "a..b"', "lake.catalog.namespace"),
        ('type = "rest"\nuri = "https://c"\nware_house = "x"', "did you mean 'warehouse'"),
    ],
)
def test_a_catalog_that_is_configured_wrongly_is_named(tmp_path, lines, message):
    with pytest.raises(ConfigError) as found:
        configured(tmp_path, f"[lake.catalog]\n{lines}")
    assert message in str(found.value)
    assert "me:secret" not in str(found.value)


def test_the_doctor_finds_nothing_in_a_catalog_that_has_all(tmp_path):
    with RestServer().running() as server:
        settings = of_server(tmp_path, server)
        assert list(of_catalog(settings)) == []
        assert server.tables == {}
        # Nor is anything left on the disk.
        assert list((tmp_path / "lake").rglob("*probe*")) == []
    assert list(of_catalog(configured(tmp_path, ""))) == []


def test_the_doctor_says_what_a_catalog_lacks(tmp_path):
    with RestServer(v3=False, multi_table=False).running() as server:
        version, several = of_catalog(of_server(tmp_path, server))
        assert version.severity is several.severity is Severity.WARNING
        assert "does not support version 3" in version.what
        assert "rows are removed by rewriting data files" in version.what
        assert "does not reliably commit several tables" in several.what
        asked = of_server(tmp_path, server, '[lake.deletes]\n"shop.public.a" = "vectors"')
        error = next(iter(of_catalog(asked)))
        assert (error.severity, error.cause) == (Severity.ERROR, Cause.CONFIG)
        assert "no deletion vectors: shop.public.a" in error.what


def test_the_doctor_says_that_a_catalog_is_slow(tmp_path, monkeypatch):
    made = open_catalog.options
    monkeypatch.setattr(open_catalog, "options", lambda place: replace(made(place), slow=0.6))
    with RestServer().running() as server:
        assert list(of_catalog(of_server(tmp_path, server))) == []
        server.delay = lambda _: 0.7
        (found,) = of_catalog(of_server(tmp_path, server))
        assert found.severity is Severity.WARNING
        assert found.what.startswith("the catalog answers slowly: ")


def test_the_doctor_refuses_a_catalog_without_branches_or_answers(tmp_path):
    with RestServer(branches=False).running() as server:
        (found,) = of_catalog(of_server(tmp_path, server))
        assert (found.severity, found.cause) == (Severity.ERROR, NotSupportedError.cause)
        assert "does not keep a table" in found.what
        server.down = True
        (found,) = of_catalog(of_server(tmp_path, server))
        assert "the catalog does not answer" in found.what


def test_where_there_are_no_vectors_all_tables_are_copied_on_write():
    assert without_vectors({}, "x") == {"default": "copy-on-write"}
    assert without_vectors({"s.a.b": "copy-on-write"}, "x")["default"] == "copy-on-write"
    with pytest.raises(NotSupportedError, match=r"no deletion vectors: s\.a\.b"):
        without_vectors({"s.a.b": "vectors"}, "x")


def test_spark_gets_the_catalog_that_the_lakes_record_names(tmp_path, monkeypatch):
    assert catalog_settings(tmp_path)["spark.sql.catalog.tuskline.type"] == "hadoop"
    record = tmp_path / RECORD
    record.parent.mkdir()
    record.write_bytes(PLACE.dump())
    for lake in (tmp_path, f"file://{tmp_path}"):
        found = catalog_settings(lake, "x")
        assert found["spark.sql.catalog.x.type"] == "rest"
        assert found["spark.sql.catalog.x.uri"] == PLACE.uri
        assert found["spark.sql.catalog.x.warehouse"] == "lakes"
        assert not any(map(lake_catalog.is_secret, found))
    monkeypatch.setenv(CREDENTIAL, f"{CLIENT}:{SECRET}")
    found = catalog_settings(tmp_path, "x")
    assert found["spark.sql.catalog.x.credential"] == f"{CLIENT}:{SECRET}"
    assert "credential" in lake_catalog.redaction(found)["spark.redaction.regex"]
    monkeypatch.setenv(TOKEN, "a-token")
    found = catalog_settings(tmp_path, "x")
    assert found["spark.sql.catalog.x.token"] == "a-token"
    assert "spark.sql.catalog.x.credential" not in found
    record.write_bytes(b"{")
    with pytest.raises(CorruptError, match="the record of the lake's catalog cannot be read"):
        catalog_settings(tmp_path)


def test_spark_gets_the_catalog_of_a_lake_in_a_bucket(s3_keys, s3_port):
    lake, store = f"s3://{BUCKET}/{uuid.uuid4().hex}/lake", options_at(s3_port)
    reached = {"endpoint": store.endpoint, "region": store.region}
    assert catalog_settings(lake, "x", **reached)["spark.sql.catalog.x.type"] == "hadoop"
    open_chain(lake, store).store.replace(RECORD, PLACE.dump())
    found = catalog_settings(f"{lake}/", "x", **reached)
    assert found["spark.sql.catalog.x.uri"] == PLACE.uri
    # By the session's own way to the bucket, whatever the catalog knows of it.
    assert found["spark.sql.catalog.x.io-impl"] == "org.apache.iceberg.hadoop.HadoopFileIO"
    with pytest.raises(UnavailableError, match="the bucket cannot be read"):
        lake_catalog.of_lake_at(lake, "http://127.0.0.1:9", "nowhere")


def test_a_record_of_a_later_version_is_read(tmp_path):
    later = PLACE.dump().replace(b'"uri"', b'"later": 1, "uri"')
    assert LakeCatalog.parse(later, "x") == PLACE


def test_a_server_may_get_another_address_and_a_lake_no_other_place(tmp_path):
    (tmp_path / "lake" / "_tuskline").mkdir(parents=True)
    chain = open_chain(tmp_path / "lake")
    for _ in range(2):
        with RestServer().running() as server:
            wanted = LakeCatalog(server.uri, allow_http=True)
            assert open_catalog.for_writing(chain, wanted).supports_v3
            assert open_catalog.recorded(chain) == wanted


def test_a_namespace_is_of_one_lake(tmp_path):
    (tmp_path / "_tuskline").mkdir()
    chain = open_chain(tmp_path)
    with RestServer().running() as server:
        catalog = open_catalog.for_writing(chain, LakeCatalog(server.uri, allow_http=True))
        assert isinstance(catalog, RestCatalog)
        for _ in range(2):
            assert WholeEpochs(catalog, "this-lake", new_snapshot).term() == 0
        with pytest.raises(LakeError, match="contains the tables of another lake, this-lake"):
            WholeEpochs(catalog, "that-lake", new_snapshot).term()


def test_statements_name_tables_as_the_catalog_does():
    tables = {
        "s.public.Odd t": CutTable("o", "tables/s/public/Odd t%t1-0a", 77, is_current=True),
        "s.my.x.t": CutTable("t", "tables/s/my%2Ex/t%t1-0a", 78, is_current=False, tag="tag"),
    }
    made = {engine: statements(engine, PLACE, tables) for engine in ENGINES}
    assert made[SPARK]["s.public.Odd t"].endswith(
        "FROM tuskline.`a`.`b`.`s`.`public`.`Odd t` VERSION AS OF 77;"
    )
    assert made[SPARK]["s.my.x.t"].endswith(".x`.`t_t1_0a` VERSION AS OF 'tag';")
    assert made[DUCKDB]["s.public.Odd t"].endswith(
        'FROM tuskline."a.b.s.public"."Odd t" AT (VERSION => 77);'
    )
    for text in made[PYICEBERG].values():
        compile(f"{preamble(PYICEBERG, PLACE, guarded=True)}\n{text}", "printed", "exec")
    assert "AUTHORIZATION_TYPE 'none'" in preamble(DUCKDB, PLACE, guarded=False)
    assert "AUTHORIZATION_TYPE" not in preamble(DUCKDB, PLACE, guarded=True)


def test_a_demo_in_a_catalog_needs_one_and_has_a_namespace_of_its_own(monkeypatch):
    assert demo_catalog.section("folder", "folder") == []
    monkeypatch.delenv(demo_catalog.URI, raising=False)
    with pytest.raises(UsageError, match="no REST catalog is named"):
        demo_catalog.section("rest", "folder")
    with pytest.raises(UsageError, match="unknown catalog 'hive'"):
        demo_catalog.section("hive", "folder")
    monkeypatch.setenv(demo_catalog.URI, "http://127.0.0.1:1/catalog")
    first, second = demo_catalog.section("rest", "folder"), demo_catalog.section("rest", "folder")
    assert "allow_http = true" in first
    assert first != second
    monkeypatch.setenv(demo_catalog.URI, "https://catalog.example.com")
    assert "allow_http = true" not in demo_catalog.section("rest", "folder")
