"""Operators' requests for a lake's tables: durable, carried out once, by the newest writer.

A request is a file in `<lake>/_tuskline/requests`, created whole and synced. The lake's writer
polls that folder, and what a request changes becomes durable in one step with its answer: the next link of
the chain has both (`Manifest.answered`). Only then is the file removed. So

- a writer that is no longer the newest carries nothing out: its link is refused;
- a crash before the link leaves the request, one after it leaves an answered request, which is removed;
- a request waits for as long as no writer runs.

`carry_out` decides, without disk or clock.
"""

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from spark_consumers.lake.epoch import rolled_back
from spark_consumers.lake.manifest.chain import Chain, Manifest
from spark_consumers.lake.manifest.pin import PINNED, RELEASING, checked_name
from spark_consumers.lake.manifest.sealed_json import dump, load
from spark_consumers.lake.manifest.table_version import LEFT, LIVE, PAUSED, RESUMING
from spark_consumers.lake.store.lake_store import STATE
from spark_consumers.lake.tables import states
from walsender_bridge.errors import (
    CorruptError,
    DeadlineError,
    DivergedError,
    LakeError,
    TrimmedError,
    UsageError,
)
from walsender_bridge.runtime import logs

#: The folder of the requests.
_ROOM = f"{STATE}/requests"
ADD, PAUSE, RESUME, RESYNC, DROP = "add", "pause", "resume", "resync", "drop"
#: Refused for a table that is not published.
OF_PUBLISHED = frozenset({ADD, RESYNC})
#: Done with the link that has the answer.
_AT_ONCE = frozenset({PAUSE, DROP})
#: About quarantined rows.
RETRY, SKIP = "retry", "skip"
#: Of the whole lake: continue with another log (`adopt`).
ADOPT = "adopt"
#: Of an epoch, or of a pin (`pins`).
PIN, UNPIN = "pin", "unpin"
#: Of a maintainer (`compactions`): data files in place of others. It is answered in the record of the offer, not in the chain.
COMPACT = "compact"
#: Of a maintainer: tables (by their paths) that have something to expire. Its answer is that it goes, once they were looked at.
CLEAN = "clean"
#: Not answered in the chain.
OF_MAINTAINERS = frozenset({COMPACT, CLEAN})
KINDS = (ADD, PAUSE, RESUME, RESYNC, DROP, RETRY, SKIP, ADOPT, PIN, UNPIN, COMPACT, CLEAN)
#: In the answer to a request for an epoch that is past its retention.
HAS_EXPIRED = "has expired"
#: Seconds for which an answer is kept for the process that waits for it.
_KEPT = 3600.0
_POLL_SECONDS = 0.1
#: The suffix of a file that is not a valid request.
_ASIDE = ".corrupt"

log = logs.logger()


@dataclass(frozen=True, slots=True)
class Request:
    """One request: `kind` of `KINDS`, and tables by `stream.schema.table`. Its id orders it by time.

    `rows`: ids of quarantined rows (`SKIP`; none means all of them). `log_id`: the log that is meant (`ADOPT`). `pin`: the name
    of a pin, `epoch`: what it keeps, and `seconds`: for how long (0: until it is released) (`PIN`, `UNPIN`). `offer`: the name of
    an offer's record (`COMPACT`).
    """

    id: str
    kind: str
    tables: tuple[str, ...]
    rows: tuple[str, ...] = ()
    log_id: str = ""
    pin: str = ""
    epoch: int = 0
    seconds: float = 0.0
    offer: str = ""


def ask(
    chain: Chain,
    kind: str,
    tables: Collection[str],
    rows: Collection[str] = (),
    log_id: str = "",
    *,
    pin: str = "",
    epoch: int = 0,
    seconds: float = 0.0,
    offer: str = "",
) -> Request:
    """Write a request to the lake, durably. Raises `UsageError`, and `LakeError` if there is no lake or it is read-only."""
    if kind not in KINDS:
        raise UsageError(f"unknown request kind {kind!r}", repair=f"use one of {', '.join(KINDS)}")
    chain.identity()
    name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:12]}"
    request = Request(name, kind, tuple(tables), tuple(rows), log_id, pin, epoch, seconds, offer)
    try:
        make_room(chain)
        chain.store.create(_file(request.id), dump(asdict(request)))
    except OSError as error:
        raise LakeError(
            f"could not write a request: {error.strerror}",
            where=room(chain),
            repair="run the command as the user of `tuskline lake run`, or grant your user write permission on this folder",
        ) from None
    return request


def make_room(chain: Chain) -> None:
    """Make the folder of the requests. The writer does, since it has to remove the requests, unless a request is made before."""
    chain.store.prepare(_ROOM)


def waiting(chain: Chain) -> Iterator[Request]:
    """The requests, in the order in which they were made. What is none is put aside by name.

    None where they could not be removed: each would be carried out again when its answer is forgotten.
    """
    if not removable(chain):
        return
    store = chain.store
    for name in _names(chain):
        try:
            yield _request(load(store, _file(name)), name)
        except FileNotFoundError:
            continue
        except (CorruptError, UsageError, OSError, ValueError, KeyError, TypeError) as error:
            # One that cannot be read must not hold up the others, or the epochs.
            store.put_aside(_file(name), _aside(name))
            log.warning("not a request", file=store.where(_aside(name)), error=str(error))


def first_of(chain: Chain, kind: str) -> Request | None:
    """The oldest request of that kind that waits, for a process that carries out none."""
    for name in _names(chain):
        with contextlib.suppress(
            CorruptError, UsageError, OSError, ValueError, KeyError, TypeError
        ):
            request = _request(load(chain.store, _file(name)), name)
            if request.kind == kind:
                return request
    return None


def _names(chain: Chain) -> list[str]:
    """The names of the requests that wait, the oldest first."""
    return [
        file.removesuffix(".json")
        for file in sorted(chain.store.names(_ROOM))
        if file.endswith(".json") and file[0].isdecimal()
    ]


def removable(chain: Chain) -> bool:
    """Whether this process may remove requests: another user's command may have made their folder."""
    return chain.store.may_remove(_ROOM)


def _request(record: Mapping[str, Any], name: str) -> Request:
    """The request in a file of this name. Raises `ValueError`, `KeyError`, `TypeError`."""
    lists = record["tables"], record.get("rows", [])
    texts = record["id"], record["kind"], record.get("log_id", ""), record.get("pin", "")
    epoch, seconds = int(record.get("epoch", 0)), float(record.get("seconds", 0.0))
    offer = record.get("offer", "")
    if not all(isinstance(found, list) for found in lists):
        raise TypeError("its tables or rows are not lists")
    if not all(isinstance(text, str) for text in [*texts, offer, *lists[0], *lists[1]]):
        raise TypeError("a member has an unexpected type")
    if record["id"] != name:
        # It would be answered under another name than it is forgotten by, and be carried out again.
        raise ValueError(f"it is request {record['id']}")
    if record["kind"] not in KINDS:
        raise ValueError(f"unknown request kind {record['kind']!r}")
    if record["kind"] in {PIN, UNPIN} and (not 0 <= seconds < float("inf") or epoch < 0):
        raise ValueError(f"no epoch or duration: {epoch}, {seconds}")
    if record["kind"] in {PIN, UNPIN}:
        checked_name(texts[3])
    rows, asked_for = tuple(lists[1]), texts[2:]
    return Request(
        *texts[:2], tuple(lists[0]), rows, *asked_for, epoch=epoch, seconds=seconds, offer=offer
    )


def forget(chain: Chain, request: Request) -> None:
    """Remove a request that has its answer."""
    chain.store.remove(_file(request.id))


def is_waiting(chain: Chain, request: Request) -> bool:
    """Whether the request is still there."""
    return chain.store.exists(_file(request.id))


def carry_out(
    head: Manifest,
    request: Request,
    published: Collection[str],
    low_offsets: Mapping[str, int],
    now: float,
    apart: Mapping[str, str],
) -> Manifest:
    """Apply a request to the head; returns the new head and the answer, a phrase for each table.

    `published`: all tables of all publications. `low_offsets`: from where on the log has each stream. `apart`: the
    streams of which it has another history than the lake, and why.
    """
    outcome = {}
    for name in request.tables:
        why = apart.get(states.stream_of(name))
        if why is not None and _needs_log(head, request.kind, name):
            outcome[name] = f"refused: {why}"
        else:
            head, outcome[name] = _one(head, request.kind, name, published, low_offsets)
    return answered(head, request, outcome, now)


def answered(head: Manifest, request: Request, outcome: Mapping[str, str], now: float) -> Manifest:
    """The head with the answer to a request: for each table a word on what was done. `now`: steady seconds."""
    kept = {i: a for i, a in head.answered.items() if now - a["at"] < _KEPT}
    answer = {"at": now, "kind": request.kind, "tables": dict(outcome)}
    return replace(head, answered={**kept, request.id: answer})


def _needs_log(head: Manifest, kind: str, name: str) -> bool:
    """Whether what is asked for waits until the log has the lake's history again."""
    table = head.tables.get(name)
    if kind == ADD:
        return table is None or table.state == LEFT
    return kind in {RESUME, RETRY} and table is not None and not table.resync


def _one(
    head: Manifest,
    kind: str,
    name: str,
    published: Collection[str],
    low_offsets: Mapping[str, int],
) -> tuple[Manifest, str]:
    table = head.tables.get(name)
    again = {n: reason for n, reason in head.not_copied.items() if n != name}
    if kind in OF_PUBLISHED and name not in published:
        return head, "refused: no source of this lake publishes it"
    if kind == ADD:
        if table is not None and table.state == LIVE:
            return head, "is in the lake already"
        if table is not None and table.state != LEFT:
            return head, f"refused: it is in the lake already, and {table.state}"
        return replace(head, not_copied=again), "is copied"
    if kind == RESYNC:
        made = states.resync(head, name, "asked for")
        return replace(made, not_copied=again), "is copied again"
    if table is None:
        return head, "refused: it is not in the lake"
    if kind == DROP:
        return _dropped(head, name)
    if kind == RETRY:
        if not table.quarantine_files:
            return head, "has no quarantined row"
        again_table = replace(table, retry_quarantined=True)
        return replace(head, tables={**head.tables, name: again_table}), "is retried"
    if kind == PAUSE:
        if table.state == PAUSED:
            return head, "is paused already"
        if table.state == LEFT:
            return head, "refused: it is no longer in the publication"
        return states.pause(head, name), "is paused"
    if table.state in {LIVE, RESUMING, LEFT} or (table.state != PAUSED and table.resync):
        return head, f"refused: it is {table.state}" if table.state == LEFT else "follows already"
    made = states.resume(head, name, low_offsets.get(states.stream_of(name), 0))
    resumed = made.tables[name]
    if not resumed.resync:
        return made, "follows again"
    how = "is brought level or copied" if resumed.is_leveled else "is copied again"
    return made, f"{how}: {resumed.resync}"


def _dropped(head: Manifest, name: str) -> tuple[Manifest, str]:
    """The head without a table that has left. One that follows its source would be copied again at once."""
    if (state := head.tables[name].state) != LEFT:
        return (
            head,
            f"refused: it is {state}; only a table that has left its publication can be dropped",
        )
    tables = {n: table for n, table in head.tables.items() if n != name}
    return replace(head, tables=tables), "is dropped"


def finished(head: Manifest, request: Request) -> dict[str, str] | None:
    """The result for each of the request's tables, once nothing is left to do; None before that.

    Raises `LakeError` for a table that was refused, or whose copy failed, and `DivergedError` if its stream is apart.
    """
    answer = head.answered.get(request.id)
    if answer is None:
        return None
    outcomes: dict[str, str] = answer["tables"]
    if request.kind in {PIN, UNPIN}:
        return _finished_pin(head, request, outcomes)
    for name, outcome in outcomes.items():
        if outcome.startswith(f"refused: {rolled_back.REASON}"):
            raise DivergedError(
                outcome.removeprefix("refused: "), where=name, repair=rolled_back.WAYS_OUT
            )
        reason = _failure(head, request.kind, name) if request.kind not in _AT_ONCE else None
        if outcome.startswith("refused: ") or reason:
            raise LakeError(
                reason or outcome.removeprefix("refused: "),
                where=name,
                repair=f"check `tuskline {'quarantine' if request.kind in {RETRY, SKIP} else 'table'} list`",
            )
    if request.kind == SKIP:
        return outcomes
    if request.kind == RETRY:
        return None if any(head.tables[name].retry_quarantined for name in outcomes) else outcomes
    if request.kind not in _AT_ONCE and not all(_follows(head, name) for name in outcomes):
        return None
    return outcomes


def _finished_pin(
    head: Manifest, request: Request, outcomes: dict[str, str]
) -> dict[str, str] | None:
    """The result for the pin, once every table has its tag, or none has it any more; None before that."""
    outcome = outcomes[request.pin]
    if outcome.startswith("refused: "):
        kind = TrimmedError if HAS_EXPIRED in outcome else LakeError
        raise kind(
            outcome.removeprefix("refused: "),
            where=request.pin,
            repair="list epochs and pins with `tuskline epochs list`",
        )
    pin = head.pins.get(request.pin)
    if request.kind == UNPIN:
        return None if pin is not None and pin.state == RELEASING else outcomes
    if pin is None or pin.state == RELEASING:
        raise LakeError(
            "the pin was released before it was complete",
            where=request.pin,
            repair="list epochs and pins with `tuskline epochs list`",
        )
    return outcomes if pin.state == PINNED else None


def _failure(head: Manifest, kind: str, name: str) -> str | None:
    """Why a table that was to follow does not, and will not by itself."""
    table = head.tables.get(name)
    if table is None:
        # A new table may be on its way.
        left = kind in {RESUME, RETRY}
    else:
        left = kind in {RESUME, RETRY, RESYNC} and table.state == LEFT and not table.resync
    if left:
        return "it has left its publication"
    if name not in head.not_copied and table is not None and states.is_undecided(table):
        return table.reason
    return head.not_copied.get(name)


def _follows(head: Manifest, name: str) -> bool:
    table = head.tables.get(name)
    return (
        table is not None and table.state == LIVE and not table.resync and name not in head.copies
    )


def wait(
    chain: Chain,
    request: Request,
    *,
    timeout: float,
    stop: threading.Event | None = None,
    polling: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Wait until a request is carried out and its effect is readable; returns the result for each table.

    `timeout` is in seconds; `polling` is called at each poll of the chain. Raises `DeadlineError`, `CorruptError` for
    a request that could not be read, and `LakeError` for what was refused or failed.
    """
    stop = stop or threading.Event()
    deadline = time.monotonic() + timeout
    while True:
        polling()
        head = chain.head()
        done = finished(head, request) if head is not None else None
        if done is not None:
            return done
        if chain.store.exists(_aside(request.id)):
            raise CorruptError(
                f"the request to {request.kind} could not be read, and was renamed",
                where=chain.store.where(_aside(request.id)),
                repair="repeat the request so that the user of `tuskline lake run` may read it",
            )
        left = deadline - time.monotonic()
        # As with epochs: the writer is another process, and the file system may not notify.
        if left <= 0 or stop.wait(min(left, max(_POLL_SECONDS, chain.store.pause))):
            answered = head is not None and request.id in head.answered
            raise DeadlineError(
                f"the request to {request.kind} is "
                + ("in progress" if answered else "not carried out yet; it stays pending"),
                where=chain.store.location,
                repair="check `tuskline table list`, and that `tuskline lake run` is running and may write to "
                f"{room(chain)}",
            )


def room(chain: Chain) -> str:
    """Where requests are, for messages."""
    return chain.store.where(_ROOM)


def _file(name: str) -> str:
    return f"{_ROOM}/{name}.json"


def _aside(name: str) -> str:
    return f"{_ROOM}/{name}{_ASIDE}"
