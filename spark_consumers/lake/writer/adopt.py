"""How a lake continues with another change log, in the same folder and under the same names, on request.

A lake is of one log: the one that `lake.json` names, or, from the link on that took another one on, the one that the
links name (`Manifest.log_id`). When the log's data was removed, another log answers, whose versions and offsets start
over. The lake's driver ends then (`LakeError`), until a request (`requests`) names exactly the log that answers. Then
its takeover takes that log on, in the one link that also has its answer:

- the link names the log;
- every table that was to follow is stopped, and brought level or copied; a paused one when it is resumed. One that
  has left stays as it is. What was copied and is not shown yet is dropped;
- each stream's cut is the new log's own. A stream that the log does not have yet is waited for;
- the epoch stays as it is: the log first skips the versions up to it, so that each later epoch has a greater one.

Why no epoch shows rows of the old history with changes of the new one, or the other way round:

- A table gets changes while it is live, or when it is shown first or again: as a copy, or `resuming`. The link leaves
  none in these states. A table that has to be copied again gets into none of them but by a copy, whatever is asked for.
- A copy is taken on by a writer alone that took over at the new log: a driver that was at work when the log changed ends its
  copies, and takes over like any other (`Lakehouse`). Its rows are the source's, and it is shown where a cut of the new log
  has passed its LSN.
- An epoch is read from one log: before it is published the log's id is asked for once more (`LogAccess.unchanged`), and a
  log that answers after everything was read was not replaced before.
- Of two drivers the one that publishes counts. A driver that still has the old log cannot publish behind the link, for
  its term is over; one that would take over finds in the link of which log the lake is. If it published before, the link
  is after that, and stops the tables that it had.
- The request names the log by its id, so a third log is not taken on by it; nor is the old log, should it come back: the
  lake is of the new one until a request names the old one. A request that names another log than the lake's, found
  while the lake's own log answers, is refused, so that it takes effect at no later time.
- A crash before the link leaves the request, and a log that has skipped versions, which are only numbers. After the
  link the request is answered, and its file is removed by the next poll.

Epochs before the link are those of the old log; readers have them as long as any.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from spark_consumers.lake.epoch.plan import position_of
from spark_consumers.lake.manifest.chain import Chain, Manifest
from spark_consumers.lake.manifest.table_version import ANOTHER_LOG, LEFT, PAUSED
from spark_consumers.lake.tables import states
from spark_consumers.lake.tables.removed import without_departed
from spark_consumers.lake.writer import requests
from spark_consumers.lake.writer.requests import Request
from walsender_bridge.change_log.client import LogStatus
from walsender_bridge.errors import LakeError, TusklineError, UnavailableError


def request(chain: Chain, log_id: str) -> Request | None:
    """Request durably that the lake continue with this log; None if it belongs to this log already.

    The lake's driver carries it out when this log answers (`requests.wait`). Raises `LakeError` if there is no lake.
    """
    if log_of(chain, chain.head()) == log_id:
        return None
    return requests.ask(chain, requests.ADOPT, (), log_id=log_id)


def log_of(chain: Chain, head: Manifest | None) -> str:
    """The id of the log that the lake is of, by its newest link `head`."""
    named = head.log_id if head is not None else ""
    return named or str(chain.identity()["log_id"])


def wanted(chain: Chain, head: Manifest | None, log_id: str) -> list[Request]:
    """The requests that are answered when the lake continues with the log that answers; none if it belongs to that log already.

    Raises `LakeError` if the lake is of another log, and no request names this one.
    """
    known = log_of(chain, head)
    if known == log_id:
        return []
    answered = head.answered if head is not None else {}
    waiting = [
        one
        for one in requests.waiting(chain)
        if one.kind == requests.ADOPT and one.id not in answered
    ]
    if not any(one.log_id == log_id for one in waiting):
        raise _of_another_log(chain.store.location, known, log_id, waiting)
    return waiting


def trouble(chain: Chain, log_id: str) -> TusklineError | None:
    """Why the lake's driver cannot continue with the log that answers; None if it can, or there is no lake yet."""
    try:
        if chain.exists():
            wanted(chain, chain.head(), log_id)
    except TusklineError as error:
        return error
    return None


def _of_another_log(where: str, known: str, log_id: str, waiting: Sequence[Request]) -> LakeError:
    others = ", ".join(sorted({one.log_id for one in waiting}))
    return LakeError(
        f"the log is {log_id}, but this lake belongs to {known}"
        + (
            f"; a request to continue with {others} is pending, but that log does not answer"
            if others
            else ""
        ),
        where=where,
        repair="tuskline reattach: the lake continues with this log under the same names, and its tables are brought level or copied;"
        " or restore the log that the lake was written from",
    )


def adopted(
    link: Manifest,
    status: LogStatus,
    sources: Collection[str],
    asked: Sequence[Request],
    *,
    holds: bool,
) -> Manifest:
    """The link from which on the lake is of the log at `status`, which has come up to the link's epoch. Pure.

    `sources`: the streams that the lake follows. `asked`: the requests that it answers. `holds`: epochs wait for the tables
    that are copied. Raises `UnavailableError` while the log does not have all of the streams, or if no request names it:
    then it has just become another one.
    """
    if all(one.log_id != status.log_id for one in asked):
        raise UnavailableError(
            f"log {status.log_id} answers now", repair="no action is needed: it is retried"
        )
    link = without_departed(link, sources)
    for stream in link.streams:
        if stream not in status.streams:
            raise UnavailableError(
                f"log {status.log_id}, with which the lake is to continue, has no stream {stream} yet",
                where=stream,
                repair="check that `tuskline bridge run` is running; or remove the source from the configuration",
            )
    outcome = {}
    for name, table in link.tables.items():
        if table.state == PAUSED:
            paused = replace(table, resync=ANOTHER_LOG)
            link = replace(link, tables={**link.tables, name: paused})
        elif table.state != LEFT:
            link = states.stop(link, name, ANOTHER_LOG, holds=holds, full_resync=True)
            outcome[name] = f"is brought level or copied: {ANOTHER_LOG}"
    streams = {stream: position_of(cut) for stream, cut in status.streams.items()}
    link = replace(link, log_id=status.log_id, streams=streams, copies={}, not_copied={})
    for one in asked:
        link = answered(link, one, status.log_id, link.steady_at, outcome)
    return link


def answered(
    head: Manifest, asked: Request, log_id: str, now: float, done: Mapping[str, str]
) -> Manifest:
    """The head of a lake that is of this log, with the answer to a request. Pure.

    `done`: for each table what was done, if the request names this log. `now`: steady seconds.
    """
    if asked.log_id != log_id:
        done = {asked.log_id: f"refused: log {log_id} answers, and the lake belongs to it"}
    return requests.answered(head, asked, done, now)
