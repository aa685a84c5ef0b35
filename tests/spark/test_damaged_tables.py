"""One table's files are damaged or gone: it is held by its name, and nothing is built on them; the others go on."""

import threading
import time
from pathlib import Path

import pytest

from spark_consumers import read
from spark_consumers.lake.format.iceberg import IcebergFormat
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.verify import verify
from spark_consumers.lake.writer import requests
from tests.support.capture_stack import PUBLICATION, STREAM
from tests.support.lake_check import assert_equal
from tests.support.waiting import wait_for
from walsender_bridge.errors import CorruptError, FencedError, TusklineError

DOCS, PAIRS, BAG = (f"{STREAM}.public.{name}" for name in ("docs", "pairs", "bag"))


def folder(pipeline, name) -> Path:
    return pipeline.lake / pipeline.head().tables[name].path


def newest(pipeline, name) -> Path:
    """The newest metadata of a table."""
    found = folder(pipeline, name).glob("metadata/v*.metadata.json")
    return max(found, key=lambda file: int(file.name[1:].partition(".")[0]))


def flip(file: Path) -> bytes:
    """Change a byte in the middle of a file; what it had before."""
    good = file.read_bytes()
    middle = len(good) // 2
    file.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
    return good


def resync(pipeline, house, name):
    requests.ask(open_chain(pipeline.lake), "resync", [name])

    def live():
        pipeline.flush(house)
        return pipeline.head().tables[name].state == "live"

    wait_for(live, 60, "the copy")


@pytest.mark.long
def test_a_driver_that_finds_damaged_tables_opens_the_lake_and_names_them(pipeline, database):
    database.execute(f"ALTER PUBLICATION {PUBLICATION} DROP TABLE bag")
    wait_for(lambda: pipeline.flush() and pipeline.head().tables[BAG].state == "left", 60, "left")
    pipeline.house.close()
    damaged = newest(pipeline, DOCS)
    flip(damaged)
    flip(newest(pipeline, BAG))
    before = pipeline.head().link
    house = pipeline.lakehouse(failing_table="go_on")
    database.execute("UPDATE docs SET n = n + 1", "UPDATE pairs SET tags = '{5}'")
    shown = pipeline.flush(house)
    assert shown["pairs"].first().tags == [5]
    table = pipeline.head().tables[DOCS]
    assert table.state == "stale"
    assert damaged.name in table.reason
    house.close()
    # The next driver finds what the first one has found, and has nothing to add.
    last = pipeline.head()
    assert last.link <= before + 4
    again = pipeline.lakehouse(failing_table="go_on")
    again.run_once()
    assert pipeline.head().tables[DOCS] == table
    links = [link for link in open_chain(pipeline.lake).links() if link.link > last.link]
    assert [link.epoch for link in links].count(last.epoch) == 1, "its takeover"
    resync(pipeline, again, DOCS)
    shown = pipeline.flush(again)
    assert set(shown.stale) == {BAG}
    assert shown["docs"].count() == 9


@pytest.mark.long
def test_a_table_whose_folder_is_gone_holds_the_epochs_until_it_is_copied_anew(pipeline, database):
    pipeline.house.close()
    lost = folder(pipeline, PAIRS)
    lost.rename(pipeline.folder / "elsewhere")
    house = pipeline.lakehouse(failing_table="hold")
    database.execute("UPDATE docs SET n = n + 1")
    with pytest.raises(CorruptError, match=rf"holds the epochs back(?s:.)*table resync {PAIRS}"):
        pipeline.flush(house)
    assert pipeline.head().tables[PAIRS].state == "held"
    resync(pipeline, house, PAIRS)
    assert_equal(database.dsn, pipeline.flush(house))


def test_a_table_that_was_restored_goes_on_when_it_is_resumed(pipeline, database):
    pipeline.house.close()
    damaged = newest(pipeline, PAIRS)
    good = flip(damaged)
    house = pipeline.lakehouse(failing_table="hold")
    database.execute("UPDATE pairs SET tags = '{6}'", "UPDATE docs SET n = n + 1")
    with pytest.raises(CorruptError, match="holds the epochs back"):
        pipeline.flush(house)
    # Resumed too early, it is held again.
    requests.ask(open_chain(pipeline.lake), "resume", [PAIRS])
    with pytest.raises(CorruptError, match="holds the epochs back"):
        pipeline.flush(house)
    damaged.write_bytes(good)
    requests.ask(open_chain(pipeline.lake), "resume", [PAIRS])
    assert_equal(database.dsn, pipeline.flush(house))


def test_a_damaged_data_file_stops_its_table_alone(pipeline, database):
    house = pipeline.lakehouse(failing_table="go_on")
    pipeline.flush(house)
    for file in folder(pipeline, DOCS).glob("data/*.parquet"):
        flip(file)
    # `body` is not sent again: it is read from the file.
    database.execute("UPDATE docs SET title = 'x'", "UPDATE pairs SET tags = '{7}'")
    shown = pipeline.flush(house)
    assert shown["pairs"].first().tags == [7]
    table = pipeline.head().tables[DOCS]
    assert table.state == "stale"
    assert ".parquet" in table.reason
    resync(pipeline, house, DOCS)
    assert_equal(database.dsn, pipeline.flush(house))


@pytest.mark.long
def test_damage_that_comes_after_the_first_write_is_not_built_upon(pipeline, database):
    house = pipeline.lakehouse(failing_table="go_on")
    database.execute("UPDATE pairs SET tags = '{7}'")
    pipeline.flush(house)
    manifests = [
        file for file in folder(pipeline, PAIRS).glob("metadata/*.avro") if "snap-" not in file.name
    ]
    for file in manifests:
        flip(file)
    database.execute("UPDATE pairs SET tags = '{8}'", "UPDATE docs SET n = n + 1")
    shown = pipeline.flush(house)
    table = pipeline.head().tables[PAIRS]
    assert table.state == "stale"
    assert ".avro" in table.reason
    assert {row.n - row.id for row in shown["docs"].collect()} == {1}
    told = [str(error) for error in verify(open_chain(pipeline.lake), lambda *_: None).errors]
    assert any(manifests[0].name in error for error in told)
    resync(pipeline, house, PAIRS)
    assert_equal(database.dsn, pipeline.flush(house))
    assert read(pipeline.spark, pipeline.lake).stale == {}


@pytest.mark.long
def test_a_writer_whose_newest_link_is_lost_says_so_and_goes_on_when_it_is_back(pipeline, database):
    database.execute("UPDATE docs SET n = n + 1")
    pipeline.flush()
    assert verify(open_chain(pipeline.lake), lambda *_: None).errors == []
    chain = open_chain(pipeline.lake)
    newest = Path(chain.where(pipeline.head()))
    kept = newest.read_bytes()
    newest.unlink()
    database.execute("UPDATE docs SET n = n + 1")
    for house in (pipeline.house, pipeline.lakehouse()):
        with pytest.raises(CorruptError, match=r"link \d+ .* was published and is lost"):
            pipeline.flush(house)
    assert "is lost" in str(verify(chain, lambda *_: None).errors[0])
    newest.write_bytes(kept)
    assert_equal(database.dsn, pipeline.flush())


@pytest.mark.long
def test_a_writer_whose_lost_link_is_given_up_goes_on_from_what_is_left(pipeline, database):
    database.execute("UPDATE docs SET n = n + 1")
    pipeline.flush()
    chain, before = open_chain(pipeline.lake), pipeline.head()
    Path(chain.where(before)).unlink()
    database.execute("UPDATE docs SET n = n + 1")
    with pytest.raises(CorruptError, match=r"remove _tuskline/newest\.json"):
        pipeline.flush()
    (pipeline.lake / "_tuskline" / "newest.json").unlink()
    stop = threading.Event()
    running = threading.Thread(target=pipeline.house.run, args=(stop,))
    running.start()
    try:
        wait_for(lambda: pipeline.head().epoch > before.epoch, 60, "an epoch")
    finally:
        stop.set()
        running.join()
    assert pipeline.head().term > before.term
    assert_equal(database.dsn, read(pipeline.spark, pipeline.lake))


def give_up_links_behind(pipeline, link):
    """The links behind this one are lost, and an operator has the lake go on from it."""
    for number in [n for n in open_chain(pipeline.lake).numbers() if n > link]:
        (pipeline.lake / "_tuskline" / "epochs" / f"{number:020d}.json").unlink()
    (pipeline.lake / "_tuskline" / "newest.json").unlink()


def test_31_rows_that_come_after_lost_links_were_given_up_are_all_there(pipeline, database):
    """The lost links are those of a takeover and of an epoch, whose names for files are the next writer's else."""
    pipeline.flush()
    pipeline.house.close()
    before = pipeline.head().link
    house = pipeline.lakehouse()
    database.execute(
        "INSERT INTO docs SELECT g, 'lost', 'b', g, 0 FROM generate_series(101, 110) g"
    )
    pipeline.flush(house)
    house.close()
    database.execute("INSERT INTO docs SELECT g, 'new', 'b', g, 0 FROM generate_series(201, 225) g")
    give_up_links_behind(pipeline, before)
    assert_equal(database.dsn, pipeline.flush(pipeline.lakehouse()))
    assert verify(open_chain(pipeline.lake), lambda *_: None).errors == []


def test_31_a_driver_takes_over_when_the_links_of_two_takeovers_are_given_up(pipeline, database):
    pipeline.flush()
    pipeline.house.close()
    before = pipeline.head()
    for _ in range(2):
        house = pipeline.lakehouse()
        house.run_once()
        house.close()
    term = pipeline.head().term
    give_up_links_behind(pipeline, before.link)
    database.execute("UPDATE docs SET n = n + 1")
    assert_equal(database.dsn, pipeline.flush(pipeline.lakehouse()))
    assert pipeline.head().term == term + 1


def test_a_takeover_that_is_refused_without_a_rival_is_told_and_tried_less_often(
    pipeline, monkeypatch
):
    pipeline.flush()
    pipeline.house.close()
    told: list[TusklineError | None] = []
    tries: list[float] = []

    def refused(*_, **__):
        tries.append(time.monotonic())
        raise FencedError("term 3 may not write this table any more", where="table")

    monkeypatch.setattr(IcebergFormat, "take_over", refused)
    stop = threading.Event()
    house = pipeline.lakehouse(failing=told.append)
    running = threading.Thread(target=house.run, args=(stop,))
    running.start()
    try:
        wait_for(lambda: len(tries) > 3, 60, "some attempts")
    finally:
        stop.set()
        running.join()
    assert "no other driver is at work: term 3 may not write" in str(told[-1])
    assert tries[3] - tries[2] >= 0.8
