"""Pins under drivers that die or are suspended before any effect: production's decisions over a lake in memory.

A driver runs up to some effect, a newer one up to some effect of its own, then a third one to its end; before it or after it the
others go on.
After each effect has to hold, for all tables of all epochs:

- a tag stands for one epoch: tables that have it agree;
- a pin that is `pinned` has its tag in every table of its epoch, and each pin in the chain has the copy of its link;
- a tag of the user's own stays what it was.

At the end, every request has its answer, and the tables have the tags of the chain's pins and no other.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from spark_consumers.lake.format import iceberg_refs
from spark_consumers.lake.format.iceberg_refs import Ref, branch_of, pin_changes
from spark_consumers.lake.manifest.chain import Manifest, TableVersion
from spark_consumers.lake.manifest.pin import PINNED, tag_of
from spark_consumers.lake.manifest.pinned_links import link_of, term_of, unneeded
from spark_consumers.lake.writer import pins, requests
from spark_consumers.lake.writer.requests import Request
from walsender_bridge.errors import FencedError, LakeError

OLD, NEW, PAIRS = "tables/s/p/docs%t1-0a", "tables/s/p/docs%t1-0b", "tables/s/p/pairs%t1-0c"
#: The folders of `docs` and `pairs` at each epoch: `docs` was copied again, so no driver takes its first folder over.
EPOCHS = {1: (OLD, PAIRS), 2: (OLD, PAIRS), 3: (NEW, PAIRS), 4: (NEW, PAIRS)}
USERS = "tuskline_pin_theirs"
NAMES = ("older", "newer", "last")


class ViolationError(Exception):
    """A reader has been given what is no epoch."""


def asked(number, kind, pin, epoch=0):
    return Request(str(number), kind, (), pin=pin, epoch=epoch)


SCRIPT = (
    asked(1, "pin", "a", 1),
    asked(2, "pin", "b", 2),
    asked(3, "unpin", "a"),
    asked(4, "pin", "a", 3),
    asked(5, "pin", "theirs", 3),
    asked(6, "unpin", "b"),
)


#: A pin that is released, and its name given to another epoch, with nothing else between the requests.
AT_ONCE = (asked(1, "pin", "a", 1), asked(2, "unpin", "a"), asked(3, "pin", "a", 3))


def version(path, epoch):
    return TableVersion(path, "iceberg", 100 * epoch + ord(path[-1]), "", (), (), 0, 0, 1, 1)


@dataclass
class Lake:
    """Links by number, copies of links, and each table's references, with how often it was committed to."""

    links: dict[int, Manifest] = field(default_factory=dict)
    records: dict[str, Manifest] = field(default_factory=dict)
    refs: dict[str, dict[str, Ref]] = field(default_factory=dict)
    commits: dict[str, int] = field(default_factory=dict)
    script: tuple[Request, ...] = SCRIPT

    def __post_init__(self):
        for epoch, (docs, pairs) in EPOCHS.items():
            tables = {"s.p.docs": version(docs, epoch), "s.p.pairs": version(pairs, epoch)}
            self.links[epoch] = Manifest("", epoch, epoch, epoch - 1, 1, 0.0, 1.0, tables=tables)
            for table in tables.values():
                main = Ref(table.snapshot_id, is_branch=True)
                self.refs[table.path] = {"main": main, branch_of(1): main}
        self.refs[NEW][USERS] = Ref(7, is_branch=False)
        self.commits = dict.fromkeys(self.refs, 0)

    @property
    def head(self):
        return self.links[max(self.links)]

    def publish(self, link):
        if link.link in self.links:
            raise FencedError("the number is taken")
        self.links[link.link] = link

    def check(self):
        head = self.head
        found: dict[str, set[int]] = {}
        for refs in self.refs.values():
            for tag, ref in refs.items():
                if ref.is_pin:
                    found.setdefault(tag, set()).add(ref.snapshot // 100)
        for tag, epochs in found.items():
            if len(epochs) > 1:
                raise ViolationError(f"{tag} stands for epochs {epochs}")
        if self.refs[NEW].get(USERS) != Ref(7, is_branch=False):
            raise ViolationError("a user's tag was changed")
        for name, pin in head.pins.items():
            if pin.record not in self.records:
                raise ViolationError(f"the copy of {name} is lost")
            for table in self.records[pin.record].tables.values():
                there = self.refs[table.path].get(tag_of(name))
                at = there.snapshot if there is not None else None
                if pin.state == PINNED and at != table.snapshot_id:
                    raise ViolationError(f"{name} is not in {table.path}")


def commits(lake, path, change) -> Iterator[str]:
    """Commit what `change` makes of the references, as `takeover.commit` does: again if others came in between."""
    while True:
        refs, number = lake.refs[path], lake.commits[path]
        made = change(refs)
        if made is None:
            return
        yield f"commit to {path}"
        if lake.commits[path] == number:
            lake.refs[path], lake.commits[path] = made, number + 1
            return


def taken(term):
    def change(refs):
        older = iceberg_refs.fenced_by(refs, term, "")
        kept = {name: ref for name, ref in refs.items() if name not in older}
        return {**kept, branch_of(term): refs["main"]}

    return change


def tagged(term, wanted):
    def change(refs):
        changes = pin_changes(refs, wanted, term, "", take=True)
        if changes is None:
            return None
        made = {name: ref for name, ref in refs.items() if name not in changes.remove}
        for name, snapshot in changes.tags.items():
            made[name] = Ref(snapshot, is_branch=False, is_pin=True)
        return {**made, branch_of(term): refs["main"]} if changes.needs_branch else made

    return change


def driver(lake, term) -> Iterator[str]:
    """A driver, from its takeover on; it yields before each effect. Raises `FencedError`."""
    yield "takeover"
    head = lake.head
    if head.term >= term:
        raise FencedError("there is a newer driver")
    head = head.next(1.0, term=term)
    lake.publish(head)
    for table in head.tables.values():
        yield from commits(lake, table.path, taken(term))
    while True:
        request = next((each for each in lake.script if each.id not in head.answered), None)
        wanted = head
        if request is not None and not pins.waits(head, request):
            wanted = yield from answered(lake, head, request)
        if wanted != head:
            head = yield from published(lake, head, wanted)
        settled = yield from carried_out(lake, head)
        yield "list copies"
        for record in unneeded(list(lake.records), head, None):
            yield f"remove {record}"
            lake.records.pop(record, None)
        if settled != head:
            head = yield from published(lake, head, settled)
        elif request is None:
            return


def published(lake, head, wanted):
    yield "publish"
    link = head.next(1.0, pins=wanted.pins, answered=wanted.answered)
    lake.publish(link)
    return link


def answered(lake, head, request):
    if request.kind == requests.UNPIN:
        return pins.released(head, request, 1.0)
    link = lake.links[request.epoch]
    record = f"{link.link:020d}-t{head.term}.json"
    assert (link_of(record), term_of(record)) == (link.link, head.term)
    yield f"create {record}"
    lake.records[record] = link
    return pins.made(head, request, link, 1.0, lambda: record)


def carried_out(lake, head):
    """`settle`, each table by itself."""
    steps = pins.settle(head)
    try:
        effect = next(steps)
        while True:
            if isinstance(effect, pins.ReadPinned):
                answer = lake.records.get(effect.record)
            else:
                answer = {}
                for path, wanted in effect.tables.items():
                    try:
                        yield from commits(lake, path, tagged(head.term, wanted))
                    except LakeError as error:
                        answer[path] = error
            effect = steps.send(answer)
    except StopIteration as end:
        return end.value


@dataclass
class Run:
    """One interleaving, as it happened."""

    lake: Lake
    trace: list[str] = field(default_factory=list)

    def go(self, name, steps, effects=None):
        """Let a driver go on for so many effects, or to its end; whether it is there."""
        for _ in iter(int, 1) if effects is None else range(effects):
            try:
                place = next(steps)
            except StopIteration:
                place = None
            except FencedError:
                self.trace.append(f"{name}: gives way")
                return True
            try:
                self.lake.check()
            except ViolationError as error:
                raise ViolationError("\n  ".join([str(error), *self.trace])) from None
            if place is None:
                return True
            self.trace.append(f"{name}: {place}")
        return False


def explore():
    """All pairs of places at which two drivers are suspended; how many interleavings. Raises `ViolationError`."""
    return sum(map(explored, (AT_ONCE, SCRIPT)))


def explored(script):
    """Those of the requests of this script."""
    count = 0
    for others_first in (False, True):
        older_effects, older_over = 1, False
        while not older_over:
            newer_effects, newer_over = 1, False
            while not newer_over:
                run = Run(Lake(script=script))
                drivers = {n: driver(run.lake, term) for term, n in enumerate(NAMES, 2)}
                older_over = run.go("older", drivers["older"], older_effects)
                newer_over = run.go("newer", drivers["newer"], newer_effects)
                for name in NAMES if others_first else ("last", "newer", "older"):
                    run.go(name, drivers[name])
                finish(run)
                count += 1
                newer_effects += 1
            older_effects += 1
    return count


def finish(run):
    """What has to hold once everybody has come to an end."""
    head = run.lake.head
    outcomes = {number: answer["tables"] for number, answer in head.answered.items()}
    assert outcomes.keys() == {each.id for each in run.lake.script}
    for request in run.lake.script:
        is_refused = outcomes[request.id][request.pin].startswith("refused: ")
        assert is_refused == (request.pin == "theirs"), outcomes
    if {name: (pin.epoch, pin.state) for name, pin in head.pins.items()} != {"a": (3, PINNED)}:
        raise ViolationError(f"{head.pins}\n  " + "\n  ".join(run.trace))
    there = {
        path: {name: ref.snapshot for name, ref in refs.items() if ref.is_pin}
        for path, refs in run.lake.refs.items()
    }
    wanted: dict[str, dict[str, int]] = {path: {} for path in there}
    for path in EPOCHS[3]:
        wanted[path] = {tag_of("a"): version(path, 3).snapshot_id}
    if there != wanted:
        raise ViolationError(f"{there}\n  " + "\n  ".join(run.trace))


def test_31_drivers_suspended_anywhere_leave_whole_pins():
    count = explore()
    print(f"{count} interleavings")
    assert count > 1000


def no_tags_first(head, request, _):
    """A release that frees the name before the tags are gone."""
    without = replace(head, pins={n: p for n, p in head.pins.items() if n != request.pin})
    return requests.answered(without, request, {request.pin: "is released"}, 1.0)


def pinned_at_once(head, request, link, now, keep):
    """A pin that counts before its tags are there."""
    made = MADE(head, request, link, now, keep)
    found = {name: replace(pin, state=PINNED) for name, pin in made.pins.items()}
    return replace(made, pins=found)


def all_at_once(head, links, _):
    """Tags of every pin that is under way."""
    found: dict[str, dict[str, int]] = {}
    for name, pin in head.pins.items():
        for table in links[pin.record].tables.values() if pin.keeps_tags else ():
            found.setdefault(table.path, {})[tag_of(name)] = table.snapshot_id
    return found


def takes_what_changes(refs, wanted, term, path, *, take):
    """A table in which no tag is to be changed is left to whoever comes."""
    return PIN_CHANGES(refs, wanted, term, path)


MADE, PIN_CHANGES = pins.made, pin_changes
MUTANTS = {
    "a table is not taken where no tag changes": (None, "pin_changes", takes_what_changes),
    "a newer writer does not fence an older copy of a table": (
        iceberg_refs,
        "fenced_by",
        lambda refs, *_: [],
    ),
    "a name is free before its tags are gone": (pins, "released", no_tags_first),
    "a pin counts before its tags are there": (pins, "made", pinned_at_once),
    "a pin that a table cannot have spoils another one": (pins, "wanted_tags", all_at_once),
    "copies of any term are removed": (
        None,
        "unneeded",
        lambda records, head, _: [
            each for each in records if each not in {pin.record for pin in head.pins.values()}
        ],
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_31_the_explorer_finds_the_mutant(monkeypatch, name):
    module, attribute, mutant = MUTANTS[name]
    if module is None:
        monkeypatch.setitem(globals(), attribute, mutant)
    else:
        monkeypatch.setattr(module, attribute, mutant)
    with pytest.raises((ViolationError, AssertionError)) as found:
        explore()
    print(found.value)
