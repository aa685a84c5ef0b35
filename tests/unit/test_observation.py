"""A look at everything: what is asked of servers is asked of all at once."""

import threading

import psycopg

from spark_consumers.lake.manifest.chain import Manifest, open_chain
from spark_consumers.lake.status import EpochStatus, write_status
from tests.support.parts_config import configuration
from walsender_bridge.config import load_config
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.observability import observation


def test_sources_are_asked_at_once_and_listed_in_their_order(tmp_path, monkeypatch):
    sections = "".join(
        f'[[source]]\nname = "{name}"\ndsn = "host=127.0.0.1 dbname={name}"\n' for name in "cab"
    )
    (tmp_path / "tuskline.toml").write_text(
        f'[log]\ndata_dir = "log"\nlisten = "127.0.0.1:{free_port()}"\n'
        f'[[log_server]]\nlisten = "127.0.0.1:1"\ndata_dir = "k"\n{sections}'
    )
    all_ask = threading.Barrier(3, timeout=30)

    def no_answer(*_: object, **__: object) -> None:
        all_ask.wait()
        raise psycopg.OperationalError("timeout expired")

    monkeypatch.setattr(psycopg, "connect", no_answer)
    with observation.Observer(load_config(tmp_path / "tuskline.toml")) as observer:
        seen = observer.observe()
    assert [source.name for source in seen.sources] == ["c", "a", "b"]
    assert all(source.error is not None for source in seen.sources)


def test_the_epoch_that_the_lakes_driver_writes_is_seen_until_it_is_published(tmp_path):
    settings = load_config(configuration(tmp_path, lake=True))
    assert settings.lake is not None
    chain = open_chain(settings.lake.uri)
    chain.initialise("log", "iceberg")
    head = Manifest("lake", 1, 6, 0, 1, 0.0)
    chain.publish(head, None)
    writing = EpochStatus(7, "write tables", 1.0, 2.0, tables=9, tables_done=4)
    write_status(chain, head, {}, writing)

    def seen():
        with observation.Observer(settings) as observer:
            return observer.observe().writing

    assert seen() == writing
    chain.publish(head.next(0.0, epoch=7), head)
    assert seen() is None
