"""Pins: epochs that are kept under a name, with a tag of that name in every table, for every engine.

A request (`requests`) makes a pin, or releases it, in one link with its answer. What follows in the tables is carried out by
the steps of `settle`, and the link after that says that it is done. So, whenever a writer dies or is suspended:

- Before the link there is nothing but a copy of the epoch's link, which is removed if no link comes to name it.
- From the link on, the writer's own retention keeps the epoch. A tag exists only between the link that makes the pin and the
  one that ends it, so the next writer finds in the chain what to tag or to remove, and repeats what was done.
- A tag never stands for two epochs: its pin is in the chain until the last table has lost it, and no other pin gets the name
  until then.
- A suspended writer changes no table of a pin that a newer one has settled, since that has its branch there (`pin_changes`),
  also where no tag had to be changed: the older one may be about to set a tag whose pin the newer one has ended.

`made`, `released`, `ended` and `settle` decide, without disk or clock; `Pins` carries out.
"""

from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from spark_consumers.lake.concurrently import each
from spark_consumers.lake.format.table_format import TableFormat
from spark_consumers.lake.manifest.chain import Chain, Manifest
from spark_consumers.lake.manifest.pin import PINNED, PINNING, RELEASING, Pin, tag_of
from spark_consumers.lake.manifest.pinned_links import PinnedLinks, at_epoch, unneeded
from spark_consumers.lake.writer import requests
from spark_consumers.lake.writer.requests import Request
from spark_consumers.spark.java_errors import is_of_data, message_of
from walsender_bridge.errors import (
    CorruptError,
    LakeError,
    NotSupportedError,
    TrimmedError,
    TusklineError,
    UnsupportedByCatalogError,
)
from walsender_bridge.runtime import fail_point, logs

log = logs.logger()

# -- what a request changes -------------------------------------------------------------------------


def waits(head: Manifest, request: Request) -> bool:
    """Whether the request cannot be decided yet: a pin of its name is being released."""
    pin = head.pins.get(request.pin)
    return request.kind == requests.PIN and pin is not None and pin.state == RELEASING


def made(
    head: Manifest, request: Request, link: Manifest | str, now: float, keep: Callable[[], str]
) -> Manifest:
    """The head with the pin that is asked for, and the answer.

    `link`: the last link of the epoch, or why there is none. `now`: steady seconds. `keep` copies that link; its result is
    the copy's name.
    """

    def answered(with_pin: Manifest, outcome: str) -> Manifest:
        return requests.answered(with_pin, request, {request.pin: outcome}, now)

    known = head.pins.get(request.pin)
    if known is not None and known.epoch != request.epoch:
        return answered(head, f"refused: it pins epoch {known.epoch} already; unpin it first")
    until = now + request.seconds if request.seconds else 0.0
    at = head.published_at + max(0.0, now - head.steady_at)
    expires_at = at + request.seconds if request.seconds else 0.0
    if known is not None:
        again = replace(known, until=until, expires_at=expires_at)
        return answered(_with(head, request.pin, again), f"pins epoch {known.epoch} already")
    if isinstance(link, str):
        return answered(head, f"refused: {link}")
    pin = Pin(link.epoch, link.link, keep(), PINNING, at, expires_at, until, request.id)
    return answered(_with(head, request.pin, pin), f"pins epoch {pin.epoch}")


def released(head: Manifest, request: Request, now: float) -> Manifest:
    """The head in which the pin is released, and the answer."""
    known = head.pins.get(request.pin)
    if known is None:
        outcome = "refused: there is no pin of this name"
    else:
        head = _with(head, request.pin, replace(known, state=RELEASING))
        outcome = f"no longer pins epoch {known.epoch}"
    return requests.answered(head, request, {request.pin: outcome}, now)


def ended(head: Manifest, now: float) -> Manifest:
    """The head in which pins are released whose time is over. `now`: steady seconds."""
    for name, pin in head.pins.items():
        if pin.keeps_tags and pin.has_ended(now):
            head = _with(head, name, replace(pin, state=RELEASING))
    return head


def _with(head: Manifest, name: str, pin: Pin) -> Manifest:
    return replace(head, pins={**head.pins, name: pin})


def _without(head: Manifest, name: str) -> Manifest:
    return replace(head, pins={n: pin for n, pin in head.pins.items() if n != name})


# -- what it changes in the tables ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadPinned:
    """The link that is copied in this record; None if the copy is damaged or lost."""

    record: str


@dataclass(frozen=True, slots=True)
class TagTables:
    """Give each table, by path, exactly these tags, and take it (`TableFormat.pin`). Answered by errors, by path."""

    tables: Mapping[str, Mapping[str, int]]


Effect = ReadPinned | TagTables


def settle(head: Manifest) -> Generator[Effect, Any, Manifest]:
    """Make the tables agree with the pins that are `pinning` or `releasing`; the head in which that is done.

    A pin that not every table can have is released, and its request is answered by the reason. While the copy of a pin's link is
    damaged, it is not known which tags its tables are to have, and only pins with damaged copies are released.
    """
    unsettled = {name: pin for name, pin in head.pins.items() if pin.state != PINNED}
    if not unsettled:
        return head
    links: dict[str, Manifest] = {}
    for record in sorted({pin.record for pin in head.pins.values()}):
        link = yield ReadPinned(record)
        if link is not None:
            links[record] = link
    for name, pin in unsettled.items():
        if pin.record not in links and not pin.keeps_tags:
            head = _without(head, name)
    if any(pin.record not in links for pin in head.pins.values()):
        return head
    for name, pin in unsettled.items():
        if name not in head.pins:
            continue
        # One by one: a pin that a table cannot have must not keep another one from it.
        tags = wanted_tags(head, links, name)
        paths = {table.path for table in links[pin.record].readable.values()}
        errors = yield TagTables({path: tags.get(path, {}) for path in sorted(paths)})
        if pin.state == RELEASING:
            # A table that is damaged keeps the tag, until housekeeping can remove it.
            head = _without(head, name)
        elif errors:
            path, error = min(errors.items())
            head = _refused(head, name, pin, f"{path}: {error.what}")
        else:
            head = _with(head, name, replace(pin, state=PINNED))
    return head


def _refused(head: Manifest, name: str, pin: Pin, reason: str) -> Manifest:
    """The head in which the pin is released, because a table cannot have its tag."""
    answer = head.answered.get(pin.request)
    if answer is not None:
        refused = {**answer, "tables": {name: f"refused: {reason}"}}
        head = replace(head, answered={**head.answered, pin.request: refused})
    return _with(head, name, replace(pin, state=RELEASING))


def wanted_tags(
    head: Manifest, links: Mapping[str, Manifest], settled: str = ""
) -> dict[str, dict[str, int]]:
    """The tags that each table is to have, by its path: of complete pins, and of the one that is being `settled`.

    `links`: by the names of their copies.
    """
    found: dict[str, dict[str, int]] = {}
    for name, pin in head.pins.items():
        is_wanted = pin.state == PINNED or (name == settled and pin.keeps_tags)
        for table in links[pin.record].readable.values() if is_wanted else ():
            found.setdefault(table.path, {})[tag_of(name)] = table.snapshot_id
    return found


# -- carrying out -----------------------------------------------------------------------------------


class Pins:
    """The pins of one lake, for one writer's term."""

    def __init__(self, chain: Chain, tables: TableFormat) -> None:
        self._chain = chain
        self._tables = tables
        self._links = PinnedLinks(chain.store)
        #: The copies that were read, by name: they never change.
        self._known: dict[str, Manifest] = {}

    def settled(self, head: Manifest) -> Manifest:
        """The head after the tables have got the tags of its pins; the caller publishes it. Raises `FencedError`."""

        def do(effect: Effect) -> Any:
            match effect:
                case ReadPinned(record):
                    return self._readable(record)
                case TagTables(tables):
                    return self._tag(tables, head.term, take=True)

        if any(pin.state != PINNED for pin in head.pins.values()):
            fail_point.hit("pin-linked")
        steps = settle(head)
        try:
            effect = next(steps)
            while True:
                effect = steps.send(do(effect))
        except StopIteration as end:
            result: Manifest = end.value
        for name in head.pins.keys() - result.pins.keys():
            log.info("unpinned", pin=name, epoch=head.pins[name].epoch)
        for name, pin in result.pins.items():
            if pin.state == PINNED and head.pins[name].state != PINNED:
                log.info("pinned", pin=name, epoch=pin.epoch)
        if result != head:
            fail_point.hit("pin-settled")
        return result

    def _tag(
        self, tables: Mapping[str, Mapping[str, int]], term: int, *, take: bool
    ) -> dict[str, TusklineError]:
        """Give the tables their tags; what kept one from getting them, by its path."""
        errors: dict[str, TusklineError] = {}

        def tag(path: str, tags: Mapping[str, int]) -> None:
            try:
                self._tables.pin(str(self._chain.root / path), term, tags, take=take)
            except Exception as error:
                if is_of_data(error):
                    refusal = f"Iceberg's library refuses the table: {message_of(error)}"
                    errors[path] = NotSupportedError(refusal, where=path)
                elif isinstance(error, CorruptError | LakeError | UnsupportedByCatalogError):
                    errors[path] = error
                else:
                    raise
                log.warning("tags of pins not written", path=path, error=str(errors[path]))
            fail_point.hit("pin-tagged-one")

        each(list(tables.items()), tag)
        return errors

    def repair(self, head: Manifest, paths: Collection[str]) -> None:
        """Give these tables the tags of the head's pins, where others have removed them, or left some of lost links."""
        tags = wanted_tags(head, self._links_of(head))
        # A table that is damaged is not taken by this: the takeover has left it alone.
        self._tag({path: tags.get(path, {}) for path in paths}, head.term, take=False)

    def needed(self, head: Manifest) -> list[Manifest]:
        """The links that the head's pins keep. Raises `CorruptError`."""
        return list(self._links_of(head).values())

    def _links_of(self, head: Manifest) -> dict[str, Manifest]:
        return {pin.record: self._link(pin.record) for pin in head.pins.values()}

    def _link(self, record: str) -> Manifest:
        if record not in self._known:
            self._known[record] = self._links.read(record)
        return self._known[record]

    def _readable(self, record: str) -> Manifest | None:
        try:
            return self._link(record)
        except CorruptError as error:
            log.warning("a pin cannot be kept up", error=str(error))
            return None

    def carry_out(self, head: Manifest, request: Request, now: float) -> Manifest:
        """The head with what a request changes, and its answer; the copy of a pinned epoch's link is durable."""
        if request.kind == requests.UNPIN:
            changed = released(head, request, now)
        else:
            changed = self._made(head, request, now)
        log.info(
            "request carried out", kind=request.kind, pin=changed.answered[request.id]["tables"]
        )
        return changed

    def _made(self, head: Manifest, request: Request, now: float) -> Manifest:
        link: Manifest | str
        try:
            link = at_epoch(self._chain, request.epoch)
        except (TrimmedError, LakeError, CorruptError) as error:
            link = error.what

        def keep() -> str:
            assert isinstance(link, Manifest)
            record = self._links.keep(link, head.term)
            fail_point.hit("pin-recorded")
            return record

        try:
            return made(head, request, link, now, keep)
        except CorruptError as error:
            # A copy that an earlier attempt has left is damaged; housekeeping removes it, for no link names it.
            return made(head, request, f"{error.where}: {error.what}", now, keep)

    def expire(self, head: Manifest, held: int | None) -> None:
        """Remove the copies that no pin needs any more. `held`: the oldest link that a reader holds."""
        for record in unneeded(self._links.names(), head, held):
            self._links.remove(record)
            self._known.pop(record, None)
