"""`tuskline status` and `tuskline lag`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import typer

from walsender_bridge.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    load_config,
)
from walsender_bridge.errors import Cause
from walsender_bridge.runtime.output import Output
from walsender_bridge.runtime.times import iso_time

if TYPE_CHECKING:
    from spark_consumers.lake.manifest.chain import Manifest
    from spark_consumers.lake.status import EpochStatus
    from walsender_bridge.observability.observation import Observation, SourceView

#: The columns that fit a terminal of 80 columns; `--json` has all, and problems are printed below.
_COLUMNS: Final = {
    "processes": ("process", "pid", "state", "restarts", "exit_code", "memory_mb"),
    "sources": ("source", "state", "server_lsn", "logged_lsn", "confirmed_lsn"),
    "slots": ("source", "slot", "active", "wal_status", "retained_bytes"),
    "gate": ("source", "candidate", "standing", "lsn", "lag_bytes"),
}


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("status")(status)
    app.command("lag")(lag)


def status(config: ConfigPath = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """Show processes, streams, slots and the newest epoch. Exit code 19: something has a problem."""
    from walsender_bridge.observability import delta_view, equality_view, level_view
    from walsender_bridge.observability.observation import Observer

    with Observer(load_config(config)) as observer:
        seen = observer.observe()
    output = Output(as_json=as_json)
    record = summary(seen)
    if as_json:
        output.record(record)
    else:
        if seen.quorum is not None and seen.quorum.problems and not seen.quorum.quorum:
            output.note(record["problems"][0])
        for name, columns in _COLUMNS.items():
            rows = [{column: row[column] for column in columns} for row in record[name]]
            if rows or name != "gate":
                output.rows(name, rows)
        if seen.slots is not None:
            output.rows("slot copies", seen.slots.rows)
        if seen.bridge is not None:
            output.record({"bridge": seen.bridge.sentence})
        if record["quorum"] is not None:
            output.record(_short(record["quorum"]))
        if seen.asks_log:
            output.record({"log version": record["log"]["version"]})
        if record["lake"] is not None:
            lake, maintenance = dict(record["lake"]), record["lake"]["maintenance"]
            lake["not_copied"] = list(lake["not_copied"])
            lake["maintenance"] = maintenance and _maintained(maintenance)
            compared = lake.pop("equality")
            if compared is not None:
                lake["equality"] = equality_view.line(compared)
            delta = lake.pop("delta")
            if delta is not None:
                lake["delta"] = delta_view.line(delta)
            leveled = lake.pop("leveled")
            if leveled is not None:
                lake["leveled"] = level_view.line(leveled)
            del lake["writing"]
            if seen.writing is not None:
                lake["writing"] = _written(seen.writing, seen.at)
            output.record(lake)
        for text in (*record["problems"], *record["degraded"], *record["notes"]):
            output.note(text)
    if record["problems"]:
        raise typer.Exit(int(Cause.UNAVAILABLE))


def _written(epoch: "EpochStatus", now: float) -> str:
    """What the epoch under way does, in a line."""
    counts = ((epoch.tasks_done, epoch.tasks, "tasks"), (epoch.tables_done, epoch.tables, "tables"))
    parts = [f"{done} of {count} {what}" for done, count, what in counts if count]
    times = f"for {now - epoch.stage_at:.0f} s, {now - epoch.began_at:.0f} s in all"
    return f"epoch {epoch.epoch}: {', '.join([epoch.stage, *parts, times])}"


def _maintained(record: dict[str, Any]) -> str:
    """What a maintainer has done, in a line."""
    text = (
        f"{record['files_before']} files became {record['files_after']}, "
        f"{record['rewritten_bytes'] >> 20} MB rewritten, {record['due_bytes'] >> 20} MB due, "
        f"{record['accepted']} offers accepted, {record['refused']} refused"
    )
    return f"{text}; {record['error']}" if record["error"] else text


def _short(quorum: dict[str, Any]) -> dict[str, Any]:
    """A summary of the quorum."""
    proposer = quorum["proposer"]
    states = [each["state"] for each in quorum["safekeepers"]]
    counted = {state: states.count(state) for state in dict.fromkeys(states)}
    return {
        "safekeepers": ", ".join(f"{count} {state}" for state, count in counted.items()),
        "quorum commit lsn": proposer["commit_lsn"],
        "quorum lag bytes": proposer["lag_bytes"],
    }


def summary(seen: "Observation") -> dict[str, Any]:
    """An observation as plain values."""
    from walsender_bridge.cli import safekeeper
    from walsender_bridge.observability import (
        delta_view,
        equality_view,
        level_view,
        maintenance_view,
        slots_view,
    )

    lake = seen.lake
    return {
        "healthy": not seen.problems,
        "problems": seen.problems,
        "degraded": seen.degraded,
        "notes": seen.notes,
        "up": seen.up,
        "processes": [
            {
                "process": process.name,
                "pid": process.pid,
                "state": process.state,
                "restarts": process.restarts,
                "exit_code": process.exit_code,
                "memory_mb": round(process.memory / (1 << 20), 1),
            }
            for process in seen.processes
        ],
        "sources": [_source(source) for source in seen.sources],
        "slots": [
            {
                "source": source.name,
                "slot": source.slot,
                "active": source.server and source.server["active"],
                "wal_status": source.server and source.server["wal_status"],
                "retained_bytes": source.server and source.server["retained_bytes"],
                "error": source.error and source.error.what,
            }
            for source in seen.sources
        ],
        "gate": [row for source in seen.sources for row in _gate(source)],
        "quorum": None if seen.quorum is None else safekeeper.summary(seen.quorum),
        "bridge": None
        if seen.bridge is None
        else {"state": seen.bridge.state, "active_at": seen.bridge.active_at},
        "slot_copies": None if seen.slots is None else slots_view.shown(seen.slots.report),
        "log": {
            "version": seen.log and seen.log.version,
            "error": seen.errors["log"].what if "log" in seen.errors else None,
        },
        "lake": None
        if not seen.lake_configured
        else {
            "epoch": lake and lake.epoch,
            "term": lake and lake.term,
            "published_at": lake and iso_time(lake.published_at),
            "tables": len(lake.readable) if lake else 0,
            "not_copied": lake.not_copied if lake else {},
            "histories": _histories(lake) if lake else {},
            "writing": _writing(seen.writing) if seen.writing else None,
            "maintenance": maintenance_view.summary(seen.maintenance),
            "equality": equality_view.summary(seen.equality),
            "leveled": level_view.summary(seen.leveled),
            "delta": delta_view.summary(seen.delta),
        },
    }


def _histories(lake: "Manifest") -> dict[str, Any]:
    """Where the histories of tables begin."""
    from spark_consumers.lake.status import history_of

    found = {name: history_of(table) for name, table in lake.tables.items()}
    return {name: history for name, history in found.items() if history is not None}


def _writing(epoch: "EpochStatus") -> dict[str, Any]:
    record = asdict(epoch)
    times = {name: iso_time(record[name]) for name in ("began_at", "stage_at", "moved_at")}
    return {**record, **times}


def _source(source: "SourceView") -> dict[str, Any]:
    from walsender_bridge.postgres.protocol.lsn import format_lsn

    capture = source.reported
    return {
        "source": source.name,
        "state": source.state,
        "server_lsn": format_lsn(capture.server_lsn),
        "logged_lsn": format_lsn(capture.logged_lsn),
        "committed_lsn": format_lsn(capture.committed_lsn),
        "confirmed_lsn": format_lsn(capture.confirmed_lsn),
        "transactions": capture.transactions,
        "error": capture.error and capture.error.what,
    }


def _gate(source: "SourceView") -> list[dict[str, Any]]:
    from walsender_bridge.observability import gate_view

    return gate_view.rows(source.name, source.gate, source.server_lsn)


def lag(config: ConfigPath = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """Show the lag of each stage and table. The stages are capture, gate, barrier and merge."""
    from walsender_bridge.observability import lag as stages
    from walsender_bridge.observability.observation import Observer

    with Observer(load_config(config)) as observer:
        seen = observer.observe()
    output = Output(as_json=as_json)
    sources = [_rounded(asdict(each)) for each in stages.of_sources(seen)]
    tables = [_rounded(asdict(each)) for each in stages.of_tables(seen)]
    quorum = [] if seen.quorum is None else stages.of_safekeepers(seen.quorum)
    safekeepers = [asdict(each) for each in quorum]
    if as_json:
        output.record({"sources": sources, "tables": tables, "safekeepers": safekeepers})
    else:
        output.rows("sources", sources)
        why = {each["table"]: each.pop("why") for each in tables}
        output.rows("tables", tables)
        for name in filter(why.get, why):
            output.note(f"{name}: {why[name]}")
        if safekeepers:
            output.rows("safekeepers", safekeepers)


def _rounded(record: dict[str, Any]) -> dict[str, Any]:
    seconds = record["seconds"]
    return {**record, "seconds": None if seconds is None else round(seconds, 3)}
