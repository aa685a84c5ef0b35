"""What is worth rewriting, who maintains a lake, and what a maintainer shows and remembers."""

import math
import random
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from spark_consumers.lake import folder
from spark_consumers.lake.catalog.folder_catalog import FolderCatalog
from spark_consumers.lake.catalog.table_catalog import Outcome, TableCommit, TableId, set_ref
from spark_consumers.lake.compaction import maintainers
from spark_consumers.lake.compaction.decide import Accepted, Refused, decide, with_merged
from spark_consumers.lake.compaction.maintainers import Maintainers, MaintainerSign
from spark_consumers.lake.compaction.offer import OFFERS, NewFile, Offer, OfferName, OldFile
from spark_consumers.lake.compaction.plan import FileState, Group, choose, groups
from spark_consumers.lake.index.liveness import Liveness
from spark_consumers.lake.index.run_format import DataFile, Tables
from spark_consumers.lake.maintenance import look, maintainer
from spark_consumers.lake.maintenance.look import is_unclean
from spark_consumers.lake.maintenance.maintainer import Limits, Maintainer
from spark_consumers.lake.maintenance.state import (
    Remembered,
    Settling,
    Summary,
    read_summary,
    write_summary,
)
from spark_consumers.lake.manifest import takeover
from spark_consumers.lake.manifest.chain import Chain, Manifest, TableVersion, open_chain
from spark_consumers.lake.manifest.sealed_json import dump
from spark_consumers.lake.manifest.takeover import Leftover, LeftoverKind
from spark_consumers.lake.writer import requests
from spark_consumers.spark.lake_catalog import RECORD, LakeCatalog
from tests.support.child import run_tuskline, start_tuskline
from tests.support.lake.table_commits import SCHEMA, added
from tests.support.rest_catalog import RestServer
from tests.support.waiting import wait_for
from walsender_bridge.cli import lake_maintain
from walsender_bridge.config import load_config
from walsender_bridge.errors import Cause, ConfigError, DeadlineError
from walsender_bridge.observability import maintenance_view
from walsender_bridge.runtime.output import Output

MB = 1 << 20
TARGET = 128 * MB


def file(number: int, size: int, removed: float = 0.0, rows: int = 1000) -> FileState:
    return FileState(f"data/{number:06d}", rows, size, int(rows * removed))


def names(found: list[Group]) -> list[list[int]]:
    return [[int(each.name[-6:]) for each in group.files] for group in found]


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    made = open_chain(tmp_path / "lake")
    made.initialise("log", "iceberg")
    return made


# -- plans ------------------------------------------------------------------------------------------


def test_many_small_files_become_one_and_few_stay() -> None:
    small = [file(number, 10_000) for number in range(6)]
    assert names(groups(small, TARGET)) == [[0, 1, 2, 3, 4, 5]]
    assert groups(small[:3], TARGET) == []
    assert groups([file(0, TARGET), file(1, TARGET)], TARGET) == []


def test_a_file_with_many_removed_rows_is_rewritten_whatever_its_size() -> None:
    large = [file(0, 4 * TARGET, 0.5), file(1, 4 * TARGET, 0.05), file(2, TARGET, 0.1)]
    assert names(groups(large, TARGET)) == [[2], [0]] or names(groups(large, TARGET)) == [[0], [2]]
    assert groups([file(1, 4 * TARGET, 0.05)], TARGET) == []


def test_a_file_waits_until_the_smaller_ones_are_worth_it() -> None:
    small = [file(number, 10_000) for number in range(1, 9)]
    assert names(groups([file(0, 60 * MB), *small], TARGET)) == [list(range(1, 9))]
    more = [file(number, 10 * MB) for number in range(10, 16)]
    assert names(groups([file(0, 60 * MB), *small, *more], TARGET))[0][0] == 0


def test_a_group_is_of_the_size_of_a_file() -> None:
    made = groups([file(number, MB) for number in range(300)], TARGET)
    assert [len(group.files) for group in made] == [128, 128, 44]


def test_what_is_written_of_a_growing_table_grows_with_the_logarithm(seed: int) -> None:
    """An append of 100 KB at a time: each byte is written again a few times, and few files are left."""
    choose_, files, written, number = random.Random(seed), [], 0, 0
    for _ in range(3000):
        files.append(file(number, choose_.randrange(50_000, 150_000)))
        number += 1
        for group in groups(files, TARGET):
            gone = {each.name for each in group.files}
            files = [each for each in files if each.name not in gone]
            files.append(file(number, group.bytes))
            number += 1
            written += group.bytes
    assert written < 8 * 3000 * 100_000
    assert len(files) < 20


def test_tables_with_the_most_to_gain_come_first_within_the_limit() -> None:
    def table(count: int, size: int) -> list[Group]:
        return [Group(tuple(file(number, size) for number in range(count)))]

    due = {"few": table(4, 10), "many": table(50, 10), "large": table(40, 1000)}
    assert list(choose(due, 1000, math.inf)) == ["many", "few"]
    assert list(choose(due, 100_000, math.inf)) == ["many", "large", "few"]
    assert list(choose(due, 1, math.inf)) == ["many"]
    assert choose({}, 1000, math.inf) == {}


def test_no_plan_is_larger_than_the_room_on_the_disk() -> None:
    small, large = (Group(tuple(file(n, size) for n in range(6))) for size in (MB, 20 * MB))
    due = {"large": [large], "small": [small, small]}
    assert choose(due, 2 * TARGET, 132 * MB) == due
    assert choose({"large": [large]}, 1, 120 * MB) == {"large": [large]}
    assert choose({"large": [large]}, 1, 119 * MB) == {}
    assert choose(due, 2 * TARGET, 11 * MB) == {"small": [small]}
    assert choose(due, 1, MB) == {}


def test_a_maintainer_leaves_the_room_on_the_disk_to_epochs(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(chain.store.location).free
    made = Maintainer(chain.root, Limits(plan_bytes=1))
    monkeypatch.setattr(folder, "ROOM", free // 2)
    assert 0 < made._room() < free
    monkeypatch.setattr(folder, "lack_of_room", lambda _: None)
    monkeypatch.setattr(folder, "ROOM", 2 * free)
    assert made._room() == 0


# -- who maintains ----------------------------------------------------------------------------------


def test_a_maintainer_that_gives_no_sign_does_not_work(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintainers, "_BEAT", 0.05)
    now = [0.0]
    seen = Maintainers(chain.store, lambda: now[0])
    assert seen.working() == set()
    sign = MaintainerSign(chain.store)
    try:
        assert seen.working() == seen.living() == {sign.name}
        now[0] = 1000.0
        deadline = time.monotonic() + 30
        while seen.working() != {sign.name}:  # it has beaten since
            assert time.monotonic() < deadline
        sign._stop.set()
        sign._thread.join()
        seen.working()
        now[0] += maintainers.SILENT
        assert seen.working() == set()
        assert seen.living() == {sign.name}
    finally:
        sign.close()
    assert seen.living() == set()
    assert chain.store.names(maintainers.MAINTAINERS) == []


def test_a_maintainer_whose_lock_cannot_be_seen_works_while_it_beats(chain: Chain) -> None:
    """As one of another machine is seen where locks stay on their machine."""
    now, beats = 0.0, 0
    seen = Maintainers(chain.store, lambda: now)
    chain.store.prepare(maintainers.MAINTAINERS)
    record = Path(chain.store.location) / maintainers.MAINTAINERS / "0a1b2c3d4e5f"
    while now < 2 * maintainers.SILENT:
        if beats * maintainers._BEAT <= now:
            beats += 1
            record.write_text(f"1 {beats}")
        assert seen.working() == seen.living() == {record.name}
        now += 1.0
    now += maintainers.UNLOCKED_SILENT
    assert seen.working() == set()
    assert not record.exists()


def test_the_one_with_the_least_name_works(chain: Chain) -> None:
    first, second = (Maintainer(chain.root, Limits()) for _ in range(2))
    try:
        for each in (first, second):
            each._sign_on()
        assert sorted([first._stands_by(), second._stands_by()]) == [False, True]
        (working,) = [each for each in (first, second) if not each._stands_by()]
        working.close()
        assert not first._sign or not first._stands_by()
        assert not second._sign or not second._stands_by()
    finally:
        first.close()
        second.close()


def test_a_maintainer_that_is_older_than_its_lake_finds_the_lakes_catalog(tmp_path: Path) -> None:
    made = Maintainer(tmp_path / "lake", Limits())
    assert not made.run_once(Event())
    chain = open_chain(tmp_path / "lake")
    chain.initialise("log", "iceberg")
    with RestServer().running() as server:
        chain.store.create(RECORD, LakeCatalog(server.uri, allow_http=True).dump())
        chain.publish(Manifest("lake", 9, 1, 0, 2, 0.0), None)
        try:
            assert not made.run_once(Event())
        finally:
            made.close()
    assert not made._catalog.is_folder


def test_an_offer_whose_request_was_put_aside_is_not_waited_for(chain: Chain) -> None:
    made, stop = Maintainer(chain.root, Limits()), Event()
    offers = [offered(chain, number) for number in (1, 2)]
    (damaged, request), (answered, other) = offers
    Path(chain.store.location, "_tuskline/requests", f"{request.id}.json").write_text("{")
    assert [each.offer for each in requests.waiting(chain)] == [answered.name]
    chain.store.replace(f"{OFFERS}/{answered.name}", dump({"accepted": True, "reason": ""}))
    waits_for_ever = threading.Timer(30, stop.set)
    waits_for_ever.start()
    try:
        assert made._outcomes([(*each, 0) for each in offers], stop)
    finally:
        waits_for_ever.cancel()
    assert not stop.is_set()
    assert (made.summary.accepted, made.summary.refused) == (1, 1)
    assert "put aside" in made.summary.refusals[0].reason
    # The writer may have read the request before.
    assert chain.store.names(OFFERS) == [damaged.name]
    assert requests.is_waiting(chain, other)


def offered(chain: Chain, number: int) -> tuple[Offer, requests.Request]:
    """An offer with its record, and the request to use it."""
    offer = Offer(str(OfferName(1, "0a", number)), "s.p.t", "tables/t", 1, ("id",))
    chain.store.prepare(OFFERS)
    chain.store.create(f"{OFFERS}/{offer.name}", dump(offer.to_json()))
    return offer, requests.ask(chain, requests.COMPACT, [offer.table], offer=offer.name)


# -- names ------------------------------------------------------------------------------------------


def test_the_files_of_an_offer_show_its_term_and_a_takeover_removes_them() -> None:
    name = OfferName(7, "0a1b2c3d4e5f", 12)
    assert OfferName.of(str(name)) == name
    assert OfferName.of("t7-zz-1") is None
    assert takeover.term_of(f"data/{name.prefix}rewritten-0.parquet") == 7
    assert takeover.term_of(name.run) == 7
    head: Any = type("Head", (), {"link": 5})
    left = Leftover(LeftoverKind.INDEX, f"tables/t/{name.run}", "tables/t")
    assert takeover.is_garbage(left, head, {"tables/t": set()}, below=8)
    assert not takeover.is_garbage(left, head, {"tables/t": {name.run}}, below=8)
    assert not takeover.is_garbage(left, head, {"tables/t": set()}, below=7)


@pytest.mark.parametrize(
    ("kind", "name"), [(LeftoverKind.QUARANTINE, "rows.parquet"), (LeftoverKind.INDEX, "x.run")]
)
def test_what_was_made_for_a_later_link_stays_until_that_is_known(kind: Any, name: str) -> None:
    head: Any = type("Head", (), {"link": 5})

    def goes(link: int) -> bool:
        left = Leftover(kind, f"tables/t/{kind.name.lower()}/{link:020d}-t7-a1-{name}", "tables/t")
        return takeover.is_garbage(left, head, {"tables/t": set()}, below=8)

    # An epoch whose link is perhaps published.
    assert not goes(6)
    assert goes(5)
    assert goes(4)


def test_an_offer_is_read_as_it_was_written() -> None:
    old = (
        OldFile("data/a", 10, "data/v.puffin", b"\x01\x02", 0, 0),
        OldFile("b", 1, "", b"", 0, 8),
    )
    offer = Offer("t1-0a-1", "s.p.t", "tables/t", 1, ("id",), old, (NewFile("c", 9, 99),), "r", 9)
    assert Offer.from_json(offer.to_json()) == offer
    with pytest.raises((KeyError, TypeError, ValueError)):
        Offer.from_json({"accepted": True})


def test_a_merged_run_takes_the_place_of_those_that_are_there_side_by_side() -> None:
    def table(*runs: str) -> TableVersion:
        return TableVersion(
            path="p",
            format="iceberg",
            snapshot_id=1,
            schema_hash="",
            key=("id",),
            text_columns=(),
            start_lsn=0,
            offset=0,
            rows=1,
            relation_id=1,
            runs=tuple((run, 5) for run in runs),
        )

    offer = Offer("t1-0a-1", "s.p.t", "p", 1, ("id",), run="m", weight=9, merges=("b", "c"))
    assert decide(offer, table("a", "b", "c", "d"), 1, {}, set) == Accepted({})
    assert with_merged([("a", 5), ("b", 5), ("c", 5), ("d", 5)], offer) == (
        ("a", 5),
        ("m", 9),
        ("d", 5),
    )
    for runs in (("a", "b", "d"), ("b", "a", "c"), ("b",), ()):
        assert isinstance(decide(offer, table(*runs), 1, {}, set), Refused)
    assert isinstance(decide(offer, table("b", "c"), 2, {}, set), Refused)


# -- what is shown and remembered -------------------------------------------------------------------


def test_a_table_that_did_not_change_is_not_looked_at_by_the_next_maintainer(chain: Chain) -> None:
    known = Remembered(chain)
    assert not known.is_done("s.p.a", "p", 1, is_settled=False)
    known.done("s.p.a", "p", 1, is_settled=False)
    known.done("s.p.b", "q", 2, is_settled=False)
    again = Remembered(chain)
    assert again.is_done("s.p.a", "p", 1, is_settled=False)
    assert not again.is_done("s.p.a", "p", 2, is_settled=False)
    assert not again.is_done("s.p.a", "other", 1, is_settled=False)
    again.keep({"s.p.b": None})
    assert not Remembered(chain).is_done("s.p.a", "p", 1, is_settled=False)
    assert Remembered(chain).is_done("s.p.b", "q", 2, is_settled=False)


def test_of_a_thousand_tables_those_that_changed_are_looked_at(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def head(changed: int) -> Manifest:
        tables = {
            f"s.p.t{number}": TableVersion(
                path=f"tables/s/p/t{number}",
                format="iceberg",
                snapshot_id=2 if number < changed else 1,
                schema_hash="",
                key=("id",),
                text_columns=(),
                start_lsn=0,
                offset=0,
                rows=1,
                relation_id=number,
                runs=(("index/1.run", 1),),
            )
            for number in range(1000)
        }
        return Manifest("lake", 1, 1, 0, 1, 0.0, tables=tables)

    looked: list[str] = []

    def liveness_of(_: str, table: TableVersion) -> Liveness:
        looked.append(table.path)
        return Liveness("", [Tables((DataFile("data/a", 10, 10),))])

    monkeypatch.setattr(maintainer, "liveness_of", liveness_of)
    for expected, changed in ((1000, 0), (0, 0), (20, 20), (0, 20)):
        looked.clear()
        # Another maintainer each time.
        assert Maintainer(chain.root, Limits())._due(head(changed)) == {}
        assert len(looked) == expected


def test_a_table_is_settled_once_it_has_not_changed_for_a_while() -> None:
    now = 100.0
    settling = Settling(60.0, lambda: now)
    assert not settling.is_settled("t", "a", 1)
    now = 159.0
    assert not settling.is_settled("t", "a", 1)
    now = 160.0
    assert settling.is_settled("t", "a", 1)
    assert not settling.is_settled("t", "a", 2)
    now = 230.0
    assert settling.is_settled("t", "a", 2)
    assert not settling.is_settled("t", "copied again", 2)
    settling.keep(())
    assert not settling.is_settled("t", "copied again", 2)


def test_what_is_done_is_looked_at_again_once_it_is_settled(chain: Chain) -> None:
    remembered = Remembered(chain)
    assert not remembered.is_done("t", "a", 1, is_settled=False)
    remembered.done("t", "a", 1, is_settled=False)
    for known in (remembered, Remembered(chain)):
        assert known.is_done("t", "a", 1, is_settled=False)
        assert not known.is_done("t", "a", 1, is_settled=True)
    remembered.done("t", "a", 1, is_settled=True)
    for known in (remembered, Remembered(chain)):
        assert known.is_done("t", "a", 1, is_settled=True)
        assert known.is_done("t", "a", 1, is_settled=False)
        assert not known.is_done("t", "a", 2, is_settled=False)


def test_few_removed_rows_are_worth_a_rewrite_of_a_settled_table() -> None:
    files = [FileState(f"{removed}", 1000, 200 << 20, removed) for removed in (0, 9, 10, 99, 100)]

    def rewritten(*, is_settled: bool) -> set[str]:
        made = groups(files, 128 << 20, is_settled=is_settled)
        return {file.name for group in made for file in group.files}

    assert rewritten(is_settled=False) == {"100"}
    assert rewritten(is_settled=True) == {"10", "99", "100"}


def test_a_table_with_what_nobody_needs_is_named() -> None:
    metadata: dict[str, Any] = {
        "snapshots": [{"snapshot-id": number} for number in (1, 2, 3)],
        "refs": {"main": {"snapshot-id": 3}, "mine": {"snapshot-id": 1}},
    }
    assert is_unclean(metadata, {3}, {})
    assert not is_unclean(metadata, {2, 3}, {})
    del metadata["refs"]["mine"]  # the user drops it
    assert is_unclean(metadata, {2, 3}, {})
    # The tag of a pin, which a user has dropped.
    assert is_unclean(metadata, {1, 2, 3}, {"tuskline_pin_a": 2})


def test_status_shows_what_was_rewritten_and_what_was_refused(chain: Chain) -> None:
    assert maintenance_view.observe(chain) is None
    assert "no maintainer" in maintenance_view.trouble(None, 30.0)
    seen = Summary(
        at=1000.0, looked_at=1000.0, accepted=2, files_before=9, files_after=2, refused=1
    )
    seen = Summary(**{**_members(seen), "refusals": seen.with_refusal("s.p.t", "it went")})
    write_summary(chain, seen)
    assert read_summary(chain) == seen == maintenance_view.observe(chain)
    record = maintenance_view.summary(seen)
    assert record is not None
    assert (record["files_before"], record["files_after"], record["refused"]) == (9, 2, 1)
    assert record["refusals"][0]["reason"] == "it went"
    assert maintenance_view.trouble(seen, 30.0, now=1100.0) == ""
    assert "not shown anything" in maintenance_view.trouble(seen, 30.0, now=2000.0)
    failed = Summary(at=1000.0, error="the disk is full")
    assert "the disk is full" in maintenance_view.trouble(failed, 30.0, now=1000.0)


def _members(summary: Summary) -> dict[str, Any]:
    return {name: getattr(summary, name) for name in Summary.__slots__}


# -- the command ------------------------------------------------------------------------------------


def settings(tmp_path: Path, lines: str = "") -> Any:
    config = tmp_path / "tuskline.toml"
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
{lines}
"""
    )
    return load_config(config)


def test_every_key_of_the_section_reaches_the_maintainer(tmp_path: Path) -> None:
    text = "[lake.maintenance]\ninterval = 3.0\nfile_bytes = 2000000\nplan_bytes = 5000000\nsettled = 7"
    made = lake_maintain._maintainer(settings(tmp_path, text))
    assert made._limits == Limits(2_000_000, 5_000_000, 3.0, 7.0)
    made.close()
    with pytest.raises(ConfigError):
        settings(tmp_path, "[lake.maintenance]\ninterval = 0")


def test_once_ends_with_a_timeout_while_no_driver_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(self: Maintainer, stop: Any, *, clean: bool) -> bool:
        self.summary = Summary(waiting=2)
        assert stop.wait(30)
        return False

    monkeypatch.setattr(Maintainer, "run_once", waits)
    with pytest.raises(DeadlineError, match="2 offers"):
        lake_maintain._once(settings(tmp_path), 0.05, Output(as_json=True))


@pytest.fixture
def unclean(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many tables have something to expire; they and their links are more than a maintainer reads at a time."""
    monkeypatch.setattr(look, "_LINKS", 3)
    count, catalog, tables = 25, FolderCatalog(chain.root), {}
    for number in range(count):
        table = TableId(("s", "p"), f"t{number}%t1-0a")
        assert catalog.create(table, SCHEMA, {}) is Outcome.WON
        for _ in range(2):
            there = catalog.load(table)
            assert there is not None
            add, snapshot = added(there, "main")
            update = set_ref("main", snapshot, "branch")
            commit = TableCommit(table, (), (add, update), there.location)
            assert catalog.commit(commit) is Outcome.WON
        path = f"tables/s/p/{table.name}"
        tables[f"s.p.t{number}"] = TableVersion(
            path, "iceberg", snapshot, "", ("id",), (), 0, 0, 0, number
        )
    head = Manifest("lake", 1, 1, 0, 1, 0.0, tables=tables)
    chain.publish(head, None)
    for _ in range(9):
        following = head.next(0.0)
        chain.publish(following, head)
        head = following
    return count


def test_once_names_all_tables_that_have_something_to_expire(
    tmp_path: Path, chain: Chain, unclean: int
) -> None:
    made, late = Maintainer(chain.root, Limits()), Event()
    late.set()
    made.clean_all(late)
    assert len(made.to_clean()) == unclean
    # The next one waits for these first.
    with pytest.raises(DeadlineError, match=f"looked at {unclean} tables"):
        lake_maintain._once(settings(tmp_path), 0.05, Output(as_json=True))
    assert len(chain.store.names("_tuskline/requests")) == 1


def test_a_look_that_is_asked_for_names_all_tables_too(chain: Chain, unclean: int) -> None:
    made, stop = Maintainer(chain.root, Limits(interval=3600.0)), Event()
    running = threading.Thread(target=made.run, args=(stop,))
    running.start()
    try:
        wait_for(lambda: made.summary.looked_at, 30, "the first look")
        assert made.to_clean() == ()
        made.look_now()
        wait_for(lambda: len(made.to_clean()) == unclean, 30, "all of them")
    finally:
        stop.set()
        running.join(30)
    assert not running.is_alive()


def test_a_running_maintainer_looks_at_all_tables_when_it_is_asked(
    tmp_path: Path, chain: Chain
) -> None:
    chain.publish(Manifest("lake", 1, 1, 0, 1, 0.0), None)
    settings(tmp_path, "[lake.maintenance]\ninterval = 3600")
    config = str(tmp_path / "tuskline.toml")

    def looked_at() -> float:
        seen = read_summary(chain)
        return seen.looked_at if seen is not None else 0.0

    running = start_tuskline(("lake", "maintain", "-c", config), log=tmp_path / "log")
    try:
        wait_for(looked_at, 60, "the first look")
        refused = run_tuskline(("lake", "maintain", "--once", "-c", config))
        assert refused.returncode == Cause.RUNNING
        (command,) = re.findall(r"kill -USR1 \d+", refused.stderr)
        assert "every 3600 s" in refused.stderr
        before = looked_at()
        subprocess.run(command.split(), check=True, timeout=10)
        wait_for(lambda: looked_at() > before, 30, "another look")
    finally:
        running.terminate()
        assert running.wait(60) == 0


def test_tables_count_as_settled_in_a_look_that_was_asked_for() -> None:
    settling = Settling(60.0, lambda: 100.0)
    assert not settling.is_settled("t", "a", 1)
    settling.is_over = True
    assert settling.is_settled("t", "a", 1)
