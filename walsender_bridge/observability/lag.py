"""The lag of each stage: capture, gate, barrier, merge. Computed from an observation. Pure.

A change passes four stages, and the lag of a stage is what has passed the previous stage, but not this one:

- `capture`: in the server's WAL, not yet durable in the log;
- `gate`: durable in the log, not yet past the commit gate (and so not committed);
- `barrier`: committed, not yet in a version;
- `merge`: in a version, not yet in a published epoch.

Bytes are WAL between two positions. Versions apply to the last two stages only. Seconds come
from commit times: 0 for a stage without lag; otherwise the lag that the server itself
measures for its walsender, for how long capture has reported nothing, or the age of the last change that
has passed, which is an upper bound. None: unknown, because a part does not answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from walsender_bridge.change_log.protocol import StreamCut
from walsender_bridge.observability.observation import Observation, SourceView
from walsender_bridge.observability.quorum_view import QuorumView

#: Seconds within which a capture that works writes its status, on a busy machine too.
REPORTED: Final = 3.0

STAGES: Final = ("capture", "gate", "barrier", "merge")


@dataclass(frozen=True, slots=True)
class Lag:
    """One stage of one source."""

    source: str
    stage: str
    bytes: int | None
    versions: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class TableLag:
    """One table of the lake: its lag is that of its stream at the last stage; `why` it is not copied."""

    table: str
    state: str
    rows: int
    bytes: int | None
    versions: int | None
    seconds: float | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class SafekeeperLag:
    """One safekeeper, or the `quorum` as a whole: bytes of WAL that the primary has sent and it lacks."""

    safekeeper: str
    state: str
    bytes: int | None


def of_safekeepers(seen: QuorumView) -> list[SafekeeperLag]:
    """The quorum, which commits wait for, then each safekeeper."""
    whole = SafekeeperLag("quorum", "follows" if seen.quorum else "lost", seen.lag_bytes)
    return [
        *([whole] if seen.proposer_here else []),
        *(SafekeeperLag(s.name, s.state, s.lag_bytes) for s in seen.safekeepers),
    ]


def of_sources(seen: Observation) -> list[Lag]:
    """All stages of all sources, in order."""
    return [lag for source in seen.sources for lag in _of_source(seen, source)]


def _of_source(seen: Observation, source: SourceView) -> Iterator[Lag]:
    server = source.server or {}
    cut = seen.log.streams.get(source.name) if seen.log is not None else None
    capture = source.reported
    logged = max(capture.logged_lsn, capture.confirmed_lsn)
    behind = max(0, source.server_lsn - logged) if logged and source.server_lsn else None
    yield Lag(source.name, "capture", behind, None, _captured_seconds(seen, source, behind, cut))
    behind = max(0, capture.logged_lsn - capture.committed_lsn) if logged else None
    yield Lag(source.name, "gate", behind, None, _known(behind, server.get("flush_lag")))
    behind = None if cut is None else max(0, capture.committed_lsn - cut.last_end_lsn)
    yield Lag(
        source.name,
        "barrier",
        behind,
        None if behind is None else int(behind > 0),
        _known(behind, _age(seen, cut)),
    )
    yield _merge(seen, source.name, cut)


def _captured_seconds(
    seen: Observation, source: SourceView, behind: int | None, cut: StreamCut | None
) -> float | None:
    if source.state == "streaming" and source.server is not None:
        measured = source.server["write_lag"] or 0.0
        # A server measures only when its walsender is answered: of one that is not, it keeps its last figure.
        silence = seen.at - source.reported.updated_at
        return max(measured, silence) if behind and silence > REPORTED else measured
    # The WAL of an idle server grows a little by itself, and it is unknown since when.
    return _known(behind, _age(seen, cut) if source.server is not None else None)


def _known(behind: int | None, seconds: float | None) -> float | None:
    return 0.0 if behind == 0 else seconds


def _age(seen: Observation, cut: StreamCut | None) -> float | None:
    if cut is None or not cut.last_commit_time:
        return None
    return max(0.0, seen.at - cut.last_commit_time / 1e6)


def _merge(seen: Observation, stream: str, cut: StreamCut | None) -> Lag:
    position = seen.lake.streams.get(stream) if seen.lake is not None else None
    if cut is None or position is None or seen.log is None or seen.lake is None:
        return Lag(stream, "merge", None, None, None)
    behind = max(0, cut.last_end_lsn - position.lsn)
    return Lag(
        stream,
        "merge",
        behind,
        max(0, seen.log.version - seen.lake.epoch),
        max(0.0, (cut.last_commit_time - position.commit_time) / 1e6) if behind else 0.0,
    )


def of_tables(seen: Observation) -> list[TableLag]:
    """Each table of the lake, and each that has not been copied."""
    if seen.lake is None:
        return []
    merges = {lag.source: lag for lag in of_sources(seen) if lag.stage == "merge"}
    tables: dict[str, Any] = seen.lake.tables
    not_copied: dict[str, str] = seen.lake.not_copied
    found = []
    for name in sorted({*tables, *not_copied}):
        stream = name.partition(".")[0]
        table, merge = tables.get(name), merges.get(stream, Lag(stream, "merge", None, None, None))
        found.append(
            TableLag(
                name,
                table.state if table is not None else "not copied",
                table.rows if table is not None else 0,
                merge.bytes,
                merge.versions,
                merge.seconds,
                not_copied.get(name, ""),
            )
        )
    return found
