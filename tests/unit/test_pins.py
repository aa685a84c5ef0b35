"""Pins as they are decided: names, requests and their answers, what is printed for other engines."""

import json
import re
from dataclasses import replace
from datetime import datetime
from functools import partial
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from spark_consumers.lake.catalog import statements
from spark_consumers.lake.catalog.statements import ENGINES, CutTable
from spark_consumers.lake.manifest import sealed_json
from spark_consumers.lake.manifest.chain import Manifest, TableVersion, open_chain
from spark_consumers.lake.manifest.pin import PINNED, PINNING, RELEASING, checked_name
from spark_consumers.lake.manifest.pinned_links import PinnedLinks, at_epoch, at_pin
from spark_consumers.lake.manifest.table_version import STALE
from spark_consumers.lake.verify import verify
from spark_consumers.lake.writer import pins, requests
from spark_consumers.lake.writer.lake_site import LakeSite
from spark_consumers.lake.writer.requests import Request
from tests.support.machine_files import machine
from walsender_bridge.cli import app as cli
from walsender_bridge.cli.epochs import cut_tables
from walsender_bridge.errors import CorruptError, LakeError, TrimmedError, UsageError

TABLE = TableVersion("tables/s/public/Odd %25t%t1-0a", "iceberg", 77, "", ("id",), (), 0, 0, 3, 1)
NAME = "s.public.Odd t"


def link(number=5, **changes):
    return Manifest(
        "lake", number, 10 * number, 0, 1, 1000.0, 500.0, tables={NAME: TABLE}, **changes
    )


def asked(kind="pin", pin="a", epoch=50, seconds=0.0, number="1"):
    return Request(number, kind, (), pin=pin, epoch=epoch, seconds=seconds)


def pin(head, request, found=None, now=500.0):
    return pins.made(head, request, link() if found is None else found, now, lambda: "record")


@pytest.mark.parametrize("name", ["close-2026_11", "0", "a" * 50])
def test_a_pin_may_have_this_name(name):
    assert checked_name(name) == name


@pytest.mark.parametrize("name", ["", "A", "-a", "_a", "a.b", "a b", "a" * 51, "ä", "a\n", "a/b"])
def test_a_pin_may_not_have_a_name_that_engines_read_differently(name):
    with pytest.raises(UsageError, match="not a valid name"):
        checked_name(name)


def test_a_request_makes_one_pin_and_repeats_change_only_its_duration():
    head = link(6)
    made = pin(head, asked(seconds=60.0), now=510.0)
    assert made.pins["a"].state == PINNING
    assert (made.pins["a"].until, made.pins["a"].expires_at) == (570.0, 1070.0)
    assert requests.finished(made, asked()) is None
    done = replace(made, pins={"a": replace(made.pins["a"], state=PINNED)})
    assert requests.finished(done, asked()) == {"a": "pins epoch 50"}
    again = pin(done, asked(number="2"), found="its epoch has expired meanwhile")
    assert again.pins == {"a": replace(done.pins["a"], until=0.0, expires_at=0.0)}
    other = pin(done, asked(epoch=60, number="3"))
    assert other.pins == done.pins
    with pytest.raises(LakeError, match="it pins epoch 50 already; unpin it first"):
        requests.finished(other, asked(epoch=60, number="3"))


def test_an_epoch_that_has_expired_is_refused_by_name():
    made = pin(link(6), asked(), "epoch 50 has expired; the oldest retained epoch is 60")
    assert made.pins == {}
    with pytest.raises(TrimmedError, match="has expired"):
        requests.finished(made, asked())


def test_a_pin_ends_with_its_time_or_on_request_and_its_name_is_free_after_its_tags():
    made = pin(link(6), asked(seconds=60.0))
    assert pins.ended(made, 559.0) == made
    over = pins.ended(made, 560.0)
    assert over.pins["a"].state == RELEASING
    assert pins.waits(over, asked(number="2"))
    assert not pins.waits(made, asked(number="2"))
    released = pins.released(made, asked("unpin", number="3"), 501.0)
    assert released.pins["a"].state == RELEASING
    assert requests.finished(released, asked("unpin", number="3")) is None
    with pytest.raises(LakeError, match="released before it was complete"):
        requests.finished(released, asked())
    gone = replace(released, pins={})
    assert requests.finished(gone, asked("unpin", number="3")) == {"a": "no longer pins epoch 50"}
    nothing = pins.released(gone, asked("unpin", number="4"), 501.0)
    with pytest.raises(LakeError, match="there is no pin of this name"):
        requests.finished(nothing, asked("unpin", number="4"))


def test_while_a_copy_is_damaged_only_its_own_pin_is_released():
    head = pin(pin(link(6), asked()), asked(pin="b", epoch=50, number="2"))
    broken = replace(head.pins["a"], record="broken", state=RELEASING)
    for state, left in ((RELEASING, {"b"}), (PINNED, {"a", "b"})):
        start = replace(head, pins={"a": replace(broken, state=state), "b": head.pins["b"]})
        steps = pins.settle(start)
        effect = next(steps)
        tagged = []
        try:
            while True:
                if isinstance(effect, pins.ReadPinned):
                    effect = steps.send(None if effect.record == "broken" else link())
                else:
                    tagged.append(effect.tables)
                    effect = steps.send({})
        except StopIteration as end:
            made = end.value
        assert made.pins.keys() == left
        # What a pin with a damaged copy wants in the tables is not known: no tag of it is removed.
        assert bool(tagged) == (state == RELEASING)


@pytest.fixture
def chain(tmp_path):
    chain = open_chain(tmp_path)
    chain.initialise("log", "iceberg")
    before = link(1)
    chain.publish(before, None)
    for number in (2, 3):
        after = before.next(600.0 * number, epoch=10 * number)
        chain.publish(after, before)
        before = after
    return chain


def test_a_pinned_epoch_is_read_from_its_copy_once_its_link_is_gone(chain):
    head = chain.head()
    record = PinnedLinks(chain.store).keep(chain.at_link(1), 1)
    assert PinnedLinks(chain.store).keep(chain.at_link(1), 1) == record
    made = pins.made(head, asked(epoch=10), chain.at_link(1), 1800.0, lambda: record)
    head_pins = made.pins
    after = head.next(1900.0, pins=head_pins)
    chain.publish(after, head)
    assert chain.retire(10_000.0) == 3
    with pytest.raises(TrimmedError):
        at_epoch(chain, 20)
    assert at_epoch(chain, 10).link == 1
    with pytest.raises(LakeError, match="pin 'a' is pinning"):
        at_pin(chain, "a")
    pinned = after.next(2000.0, pins={"a": replace(head_pins["a"], state=PINNED)})
    chain.publish(pinned, after)
    assert at_pin(chain, "a").tables == {NAME: TABLE}
    path = chain.root / "_tuskline" / "pins" / record
    path.write_bytes(path.read_bytes().replace(b'"epoch": 10', b'"epoch": 11'))
    with pytest.raises(CorruptError, match="does not match its checksum"):
        at_pin(chain, "a")
    path.unlink()
    with pytest.raises(CorruptError, match="the pinned epoch is lost"):
        at_epoch(chain, 10)
    lost = [e for e in verify(chain, lambda *_: None).errors if e.what.startswith("pin a: ")]
    assert [(each.what, each.where) for each in lost] == [
        ("pin a: the pinned epoch is lost", str(path))
    ]


def test_a_pinned_epoch_is_read_from_its_copy_while_its_link_is_damaged(chain):
    head = chain.head()
    record = PinnedLinks(chain.store).keep(chain.at_link(1), 1)
    made = pins.made(head, asked(epoch=10), chain.at_link(1), 1800.0, lambda: record)
    pinned = made.pins["a"]
    chain.publish(head.next(1900.0, pins={"a": replace(pinned, state=PINNED)}), head)
    path = chain.root / "_tuskline" / "epochs" / f"{1:020d}.json"
    path.write_bytes(path.read_bytes().replace(b'"epoch": 10', b'"epoch": 11'))
    with pytest.raises(CorruptError):
        chain.at_epoch(10)
    assert at_epoch(chain, 10) == at_pin(chain, "a")


def test_a_damaged_copy_that_was_left_refuses_the_pin_and_not_the_round(chain):
    head = chain.head()
    record = PinnedLinks(chain.store).keep(chain.at_link(1), head.term)
    path = chain.root / "_tuskline" / "pins" / record
    path.write_bytes(path.read_bytes()[:-1])
    of_lake = pins.Pins(chain, Mock())
    made = of_lake.carry_out(head, asked(epoch=10), 1800.0)
    assert made.pins == {}
    with pytest.raises(LakeError, match=f"{record}: ") as found:
        requests.finished(made, asked(epoch=10))
    print(found.value)
    # No link names it, so it goes, and with it the trouble.
    of_lake.expire(head, None)
    again = of_lake.carry_out(made, asked(epoch=10, number="2"), 1800.0)
    assert again.pins["a"].record == record


def test_the_terms_of_copies_are_not_used_again(chain):
    """They are what is left of a writer whose links are lost."""
    PinnedLinks(chain.store).keep(chain.at_link(1), 9)
    assert LakeSite(chain, Mock(terms=lambda _: [])).used_term() == 9


def test_a_pin_that_is_released_during_a_read_is_not_said_to_be_lost(chain, monkeypatch):
    before = chain.head()
    record = PinnedLinks(chain.store).keep(chain.at_link(1), 1)
    made = pins.made(before, asked(epoch=10), chain.at_link(1), 1800.0, lambda: record)
    head = before.next(1900.0, pins={"a": replace(made.pins["a"], state=PINNED)})
    chain.publish(head, before)
    read = PinnedLinks.read

    def released(links, name):
        if chain.head() == head:
            chain.publish(head.next(2000.0, pins={}), head)
            links.remove(name)
        return read(links, name)

    monkeypatch.setattr(PinnedLinks, "read", released)
    with pytest.raises(LakeError, match="there is no pin 'a'"):
        at_pin(chain, "a")


@pytest.mark.parametrize(
    "wrong", [{"pin": "A"}, {"pin": 5}, {"epoch": -1}, {"seconds": float("inf")}, {"epoch": "x"}]
)
def test_a_request_for_a_pin_that_is_none_is_put_aside(chain, wrong):
    request = requests.ask(chain, "pin", (), pin="a", epoch=10, seconds=5.0)
    assert list(requests.waiting(chain)) == [request]
    path = chain.root / "_tuskline" / "requests" / f"{request.id}.json"
    record = sealed_json.load(chain.store, f"_tuskline/requests/{request.id}.json")
    path.write_bytes(sealed_json.dump({**record, **wrong}))
    assert list(requests.waiting(chain)) == []
    assert not path.exists()


def test_the_commands_ask_and_show_what_is_pinned(chain, tmp_path_factory):
    config = tmp_path_factory.mktemp("config") / "tuskline.toml"
    config.write_text(machine("lake").replace('uri = "lake"', f'uri = "{chain.root}"'))

    def run(*arguments):
        done = CliRunner().invoke(cli.app, ["epochs", *arguments, "-c", str(config), "--json"])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return json.loads(done.stdout.splitlines()[-1])

    for wrong, error in (
        (("pin", "A"), UsageError),
        (("pin", "a", "--for", "soon"), UsageError),
        (("pin", "a", "--for", "0d"), UsageError),
        (("pin", "a", "--epoch", "25"), LakeError),
        (("show", "10", "--sql", "oracle"), UsageError),
    ):
        with pytest.raises(error):
            run(*wrong)
    assert list(requests.waiting(chain)) == []
    assert run("pin", "a", "--epoch", "10", "--for", "30d", "--no-wait")["outcome"] == "requested"
    # Without an epoch it is the newest.
    assert run("pin", "new", "--no-wait")["epoch"] == 30
    head = chain.head()
    records = PinnedLinks(chain.store)
    for request in requests.waiting(chain):
        found = at_epoch(chain, request.epoch)
        head = pins.made(head, request, found, 1800.0, partial(records.keep, found, 1))
        requests.forget(chain, request)
    done = {name: replace(each, state=PINNED) for name, each in head.pins.items()}
    chain.publish(head.next(1900.0, pins=done), chain.head())
    chain.retire(10_000.0)
    # Named again, it is the epoch that it pins.
    assert run("pin", "a", "--no-wait")["epoch"] == 10
    assert run("unpin", "a", "--no-wait")["outcome"] == "requested"
    oldest, *newest = [(row["epoch"], row["pins"]) for row in run("list")["epochs"]]
    assert oldest == (10, ["a"])
    assert newest == [(30, ["new"])] * len(newest) != []
    shown = run("show", "10")
    (found,) = shown["pins"]
    assert (shown["epoch"], found["pin"], found["state"]) == (10, "a", "pinned")
    # A live table has the rows of the epoch itself.
    assert {table["as_of"] for table in shown["tables"].values()} == {10}
    pinned_at, expires_at = map(datetime.fromisoformat, (found["pinned_at"], found["expires_at"]))
    assert (expires_at - pinned_at).days == 30
    (statement,) = run("show", "10", "--sql", "spark")["statements"]
    assert statement["table"] == NAME
    assert statement["statement"].endswith("VERSION AS OF 'tuskline_pin_a';")


def test_names_are_quoted_in_each_language():
    tables = {
        NAME: CutTable('o`"d', TABLE.path, 77, is_current=True),
        "s.public.t": CutTable(
            "t", "tables/s/public/t%t1-0a", 78, is_current=False, tag="tuskline_pin_x"
        ),
    }
    made = {engine: statements.statements(engine, "/l'ake", tables) for engine in ENGINES}
    assert made["spark"] == {
        NAME: 'CREATE OR REPLACE TEMPORARY VIEW `o``"d` AS SELECT * FROM '
        "tuskline.`s`.`public`.`Odd %25t%t1-0a` VERSION AS OF 77;",
        "s.public.t": "CREATE OR REPLACE TEMPORARY VIEW `t` AS SELECT * FROM "
        "tuskline.`s`.`public`.`t%t1-0a` VERSION AS OF 'tuskline_pin_x';",
    }
    assert made["duckdb"]["s.public.t"] == (
        "CREATE OR REPLACE VIEW \"t\" AS SELECT * FROM iceberg_scan('/l''ake/tables/s/public/t%t1-0a', "
        "snapshot_from_id => 78);"
    )
    assert made["trino"][NAME] == (
        'SELECT * FROM tuskline."s.public"."Odd t" FOR VERSION AS OF 77;'
    )
    # Its name stands for another copy by now.
    registered, select = made["trino"]["s.public.t"].splitlines()
    assert registered.startswith("CALL tuskline.system.register_table(schema_name => 's.public'")
    assert select.startswith('SELECT * FROM tuskline."s.public"."t%t1-0a" FOR VERSION')
    for text in made["pyiceberg"].values():
        compile(text, "printed", "exec")
    assert re.search(r"use_ref\('tuskline_pin_x'\)", made["pyiceberg"]["s.public.t"])


def test_tables_that_read_leaves_out_are_left_out_of_the_statements():
    stale = replace(TABLE, state=STALE, as_of=40, reason="a reason")
    head = replace(link(), tables={NAME: stale})
    assert cut_tables(head, head) == ({}, {NAME: "its rows are those of epoch 40: a reason"})
    tables, left_out = cut_tables(link(), pin(link(6), asked()))
    assert (tables[NAME].tag, tables[NAME].is_current, left_out) == (None, True, {})
