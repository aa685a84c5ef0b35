"""A lake's maintainer: looks for what is worth rewriting, prepares it, and offers it to the writer (`compaction`).

It never makes anything part of the lake, so it may be killed, suspended or started twice: what it offers is refused if it is
not right any more, and what it leaves is removed by the writer.
"""

import math
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from spark_consumers.lake import folder
from spark_consumers.lake.catalog.folder_catalog import FolderCatalog
from spark_consumers.lake.catalog.open_catalog import for_reading
from spark_consumers.lake.catalog.table_catalog import TableCatalog, TableId
from spark_consumers.lake.compaction.maintainers import Maintainers, MaintainerSign
from spark_consumers.lake.compaction.offer import OFFERS, Offer, OfferName
from spark_consumers.lake.compaction.plan import FileState, Group, choose, groups
from spark_consumers.lake.compaction.rewrite import (
    compactable,
    files_of,
    intent,
    liveness_of,
    merge_runs,
    prepare,
    states,
)
from spark_consumers.lake.format import checksums
from spark_consumers.lake.index.plan import unmerged
from spark_consumers.lake.index.run_format import IndexDamagedError
from spark_consumers.lake.maintenance.look import Look
from spark_consumers.lake.maintenance.state import Remembered, Settling, Summary, write_summary
from spark_consumers.lake.manifest.chain import LIVE, Manifest, TableVersion, open_chain
from spark_consumers.lake.manifest.sealed_json import dump, parse
from spark_consumers.lake.store.lake_store import FROM_ENVIRONMENT, StoreOptions
from spark_consumers.lake.store.place import Place
from spark_consumers.lake.writer import requests
from walsender_bridge.errors import CorruptError, TusklineError, UnavailableError
from walsender_bridge.runtime import fail_point, logs

#: Seconds between two looks at an offer that the writer has not decided on.
_POLL = 0.2
#: Seconds between two looks at whether the next look is asked for.
_ASKED = 0.5
#: Rows of a run of the row index below which epochs merge it soon enough.
_LEAST_RUN = 1_000_000
#: Pauses after failures, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0

log = logs.logger()

#: An offer, and the request to use it.
_Asked = tuple[Offer, requests.Request]


@dataclass(frozen=True, slots=True)
class Limits:
    """How a lake is maintained. `file_bytes`: of a data file that needs no others, about. `plan_bytes`: read for a plan, at most.

    `interval`: seconds between two looks at the lake. `settled`: seconds after which a table that has not changed is settled (`plan`).
    """

    file_bytes: int = 128 << 20
    plan_bytes: int = 1 << 30
    interval: float = 30.0
    settled: float = 900.0


class Maintainer:
    """The maintainer of one lake. `show` is called with what it does, after each step.

    Raises `OSError` or `TusklineError` if it cannot show that it lives.
    """

    def __init__(
        self,
        lake: str | Place,
        limits: Limits,
        *,
        store: StoreOptions = FROM_ENVIRONMENT,
        show: Callable[[Summary], None] = lambda _: None,
    ) -> None:
        self._chain = open_chain(lake, store)
        self._limits = limits
        self._show = show
        self._sign: MaintainerSign | None = None
        self._others = Maintainers(self._chain.store)
        self._remembered = Remembered(self._chain)
        self._settling = Settling(limits.settled)
        self._looked_at = float("-inf")
        self._cleaning: requests.Request | None = None
        self._asked = threading.Event()
        self._number = 0
        self.summary = Summary(began_at=time.time())

    @cached_property
    def _catalog(self) -> TableCatalog:
        """What has the tables. The lake's record of it is there before the first link, and not before the lake."""
        return for_reading(self._chain) or FolderCatalog(self._chain.root)

    @cached_property
    def _look(self) -> Look:
        return Look(self._chain, self._catalog)

    def run(self, stop: threading.Event) -> None:
        """Maintain the lake until `stop` is set. Survives what keeps it from working for a time."""
        pause = _FIRST_PAUSE
        try:
            while not stop.is_set():
                try:
                    if self._asked.is_set():
                        self._asked.clear()
                        self._settling.is_over = True
                        self._looked_at = float("-inf")
                    worked = self.run_once(stop)
                    pause = _FIRST_PAUSE
                    if not worked:
                        self._settling.is_over = False
                        self._wait(stop)
                except Exception as error:
                    log.warning(
                        "maintenance failed",
                        error=str(error)[:500],
                        exc_info=not isinstance(error, (TusklineError, OSError)),
                    )
                    self._say(error=str(error)[:500])
                    stop.wait(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            self.close()

    def look_now(self) -> None:
        """Have `run` look at the lake at once, at all tables as if they were settled. A signal handler may call it."""
        self._asked.set()

    def _wait(self, stop: threading.Event) -> None:
        """Wait for the next look, which may be asked for."""
        until = time.monotonic() + self._limits.interval
        while not self._asked.is_set() and (left := until - time.monotonic()) > 0:
            if stop.wait(min(left, _ASKED)):
                return

    def begin(self) -> None:
        """Show that this maintainer lives: from then on epochs leave rewriting to it."""
        self._sign_on()

    def run_once(self, stop: threading.Event, *, clean: bool = True) -> bool:
        """Make one plan and carry it out; whether the writer has accepted something, so that there may be more to do.

        `clean`: look at some tables for what may expire, too, if it is time.
        """
        if not self._chain.exists() or (head := self._chain.head()) is None:
            return False
        self._sign_on()
        if self._stands_by():
            self._say(is_standing_by=True, error="")
            return False
        if clean:
            self._clean(head, stop)
        due = self._due(head)
        chosen = choose(due, self._limits.plan_bytes, self._room()) if due else {}
        left = sum(g.bytes for name in due for g in due[name]) - sum(
            g.bytes for name in chosen for g in chosen[name]
        )
        self._say(
            looked_at=time.time(),
            tables=len(head.tables),
            due_bytes=left,
            is_standing_by=False,
            error="",
        )
        offers = []
        for name, some in chosen.items():
            if stop.is_set():
                break
            if (asked := self._compact(head, name, some)) is not None:
                offers.append((*asked, sum(group.bytes for group in some)))
        if not offers and not stop.is_set() and (merge := self._merge(head)) is not None:
            offers.append((*merge, 0))
        return self._outcomes(offers, stop)

    def close(self) -> None:
        """Show that this maintainer has ended. Its offers stay, for the writer to decide on."""
        if self._sign is not None:
            self._sign.close()
            self._sign = None

    def _sign_on(self) -> None:
        if self._sign is not None and self._sign.is_lost():
            self.close()
        if self._sign is None:
            self._sign = MaintainerSign(self._chain.store)
            log.info("maintaining", lake=self._chain.store.location, maintainer=self._sign.name)

    def _stands_by(self) -> bool:
        """Whether another maintainer works on the lake: the one with the least name does."""
        assert self._sign is not None
        return min(self._others.working() | {self._sign.name}) != self._sign.name

    def _room(self) -> float:
        """Bytes that may be written. Raises `LakeError` where the disk has none to begin with."""
        if (full := folder.lack_of_room(self._chain.root)) is not None:
            raise full
        on_disk = self._chain.store.folder
        if on_disk is None:
            return math.inf
        return max(0, shutil.disk_usage(on_disk).free - folder.ROOM)

    def _clean(self, head: Manifest, stop: threading.Event) -> None:
        """Name tables to the writer that have something to expire, if it is time for a look at some, or all are asked for."""
        if time.monotonic() - self._looked_at < self._limits.interval:
            return
        self._looked_at = time.monotonic()
        if self._cleaning is None:
            # An earlier maintainer's: requests must not pile up while no driver runs.
            self._cleaning = requests.first_of(self._chain, requests.CLEAN)
        if self.to_clean():
            return
        everything = self._settling.is_over
        if paths := self._look.all_unclean(head, stop) if everything else self._look.unclean(head):
            log.info("to be cleaned", tables=paths)
            self._cleaning = requests.ask(self._chain, requests.CLEAN, paths)

    def clean_all(self, stop: threading.Event) -> None:
        """Name all tables to the writer that have something to expire, once it has looked at those that were named before.

        `stop` ends the wait for that, and not the look.
        """
        head = self._chain.head() if self._chain.exists() else None
        if head is None or self.summary.is_standing_by:
            return
        self._cleaning = self._cleaning or requests.first_of(self._chain, requests.CLEAN)
        self.wait_for_cleaning(stop)
        if self.to_clean():
            return
        if paths := self._look.all_unclean(head, threading.Event()):
            self._cleaning = requests.ask(self._chain, requests.CLEAN, paths)

    def to_clean(self) -> tuple[str, ...]:
        """The paths of the tables that were named to the driver, and that it has not looked at yet."""
        if self._cleaning is not None and not requests.is_waiting(self._chain, self._cleaning):
            self._cleaning = None
        return self._cleaning.tables if self._cleaning is not None else ()

    def wait_for_cleaning(self, stop: threading.Event) -> None:
        """Wait until the driver has looked at what was named to it, or until `stop`."""
        while self.to_clean() and not stop.wait(max(_POLL, self._chain.store.pause)):
            pass

    # -- what is due ------------------------------------------------------------------------------------

    def _due(self, head: Manifest) -> dict[str, list[Group]]:
        """What is worth rewriting, by table. Only tables that have changed since nothing was left to do are looked at."""
        found = {}
        self._remembered.keep(head.tables)
        self._settling.keep(head.tables)
        for name, table in head.tables.items():
            if table.state != LIVE or table.runs is None:
                continue
            known = name, table.path, table.snapshot_id
            is_settled = self._settling.is_settled(*known)
            if self._remembered.is_done(*known, is_settled=is_settled):
                continue
            try:
                liveness = liveness_of(str(self._chain.root / table.path), table)
            except IndexDamagedError as error:
                # Or the table has gone on, and the run with it.
                log.debug("not looked at", table=name, reason=str(error))
                continue
            files = self._compactable(table, states(liveness))
            if due := groups(files, self._limits.file_bytes, is_settled=is_settled):
                found[name] = due
            else:
                self._remembered.done(*known, is_settled=is_settled)
        return found

    def _compactable(self, table: TableVersion, files: list[FileState]) -> list[FileState]:
        loaded = self._catalog.load(TableId.at(table.path)) if files else None
        return compactable(loaded.metadata, files) if loaded is not None else []

    # -- offers -----------------------------------------------------------------------------------------

    def _merge(self, head: Manifest) -> _Asked | None:
        """Offer to merge runs of a table whose row index has many of one size, as offers leave them; None if there is none."""
        for name, table in head.tables.items():
            if table.state != LIVE or table.runs is None:
                continue
            place = unmerged([weight for _, weight in table.runs], _LEAST_RUN)
            if place is not None:
                return self._offer(
                    head, name, lambda *given, place=place: merge_runs(*given, *place)
                )
        return None

    def _compact(self, head: Manifest, name: str, some: list[Group]) -> _Asked | None:
        def prepared(root: Place, name: str, table: TableVersion, number: OfferName) -> Offer:
            return prepare(root, self._catalog, name, table, number, some)

        return self._offer(head, name, prepared)

    def _offer(
        self,
        head: Manifest,
        name: str,
        prepared: Callable[[Place, str, TableVersion, OfferName], Offer],
    ) -> _Asked | None:
        """Have the files prepared, and ask the writer to use them; None if the table has gone on meanwhile."""
        assert self._sign is not None
        self._number += 1
        number = OfferName(head.term, self._sign.name, self._number)
        table, record = head.tables[name], f"{OFFERS}/{number}"
        self._chain.store.prepare(OFFERS)
        self._chain.store.create(record, dump(intent(number, name, table).to_json()))
        try:
            offer = prepared(self._chain.root, name, table, number)
            fail_point.hit("compaction-prepared")
            if self._sign.is_lost():
                raise UnavailableError(
                    "the maintainer could not show that it lives",
                    where=self._chain.store.location,
                    repair="check the lake's store; the maintainer continues automatically",
                )
            self._chain.store.replace(record, dump(offer.to_json()))
            request = requests.ask(self._chain, requests.COMPACT, [name], offer=offer.name)
        except Exception as error:
            self._abandon(table, number, record)
            if isinstance(error, FileNotFoundError | IndexDamagedError | CorruptError) and (
                self._has_gone_on(name, table)
            ):
                log.info("compaction abandoned: the table has gone on", table=name)
                return None
            raise
        fail_point.hit("compaction-offered")
        return offer, request

    def _has_gone_on(self, name: str, table: TableVersion) -> bool:
        head = self._chain.head()
        return head is None or head.tables.get(name) != table

    def _abandon(self, table: TableVersion, number: OfferName, record: str) -> None:
        """Remove what nobody was asked to use."""
        place = self._chain.root / table.path
        files, drafts = files_of(place, number)
        for file in (*drafts, *files, place / number.run):
            checksums.remove(file)
        self._chain.store.remove(record)

    def _outcomes(
        self, offers: list[tuple[Offer, requests.Request, int]], stop: threading.Event
    ) -> bool:
        """Wait for the writer's decisions; whether it has accepted an offer."""
        waiting, accepted = list(offers), False
        while waiting:
            self._say(waiting=len(waiting))
            for asked in list(waiting):
                offer, request, size = asked
                outcome = self._outcome(offer, request)
                if outcome is None:
                    continue
                waiting.remove(asked)
                accepted |= outcome[0]
                self._count(offer, size, *outcome)
            if waiting and stop.wait(max(_POLL, self._chain.store.pause)):
                break
        self._say(waiting=len(waiting))
        return accepted

    def _outcome(self, offer: Offer, request: requests.Request) -> tuple[bool, str] | None:
        """Whether the offer was accepted, and why not; None: it is not decided on."""
        name = f"{OFFERS}/{offer.name}"
        # The answer is there before the request goes, so it is looked for in the other order.
        is_waiting = requests.is_waiting(self._chain, request)
        try:
            record = parse(self._chain.store.read(name), name)
        except FileNotFoundError:
            return False, "its record was removed"
        if "accepted" not in record:
            # Its files stay, for the writer to remove: it may be deciding on what it has read of the request before.
            return None if is_waiting else (False, "its request was put aside or removed")
        self._chain.store.remove(name)
        return bool(record["accepted"]), str(record.get("reason", ""))

    def _count(self, offer: Offer, size: int, accepted: bool, reason: str) -> None:
        known = self.summary
        if not accepted:
            log.info("offer refused", table=offer.table, reason=reason)
            self._say(refused=known.refused + 1, refusals=known.with_refusal(offer.table, reason))
            return
        self._say(
            accepted=known.accepted + 1,
            rewritten_at=time.time(),
            rewritten_bytes=known.rewritten_bytes + size,
            files_before=known.files_before + len(offer.old),
            files_after=known.files_after + len(offer.files),
        )

    def _say(self, **changes: Any) -> None:
        name = self._sign.name if self._sign is not None else ""
        self.summary = replace(self.summary, at=time.time(), maintainer=name, **changes)
        write_summary(self._chain, self.summary)
        self._show(self.summary)
