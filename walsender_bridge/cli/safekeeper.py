"""`tuskline safekeeper`: the state of the safekeepers, and whether their WAL is intact and identical."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from walsender_bridge.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    load_config,
    need_here,
)
from walsender_bridge.errors import Cause, ConfigError
from walsender_bridge.runtime.output import Output
from walsender_bridge.runtime.times import with_iso_times

if TYPE_CHECKING:
    from walsender_bridge.config import Config
    from walsender_bridge.observability.quorum_view import QuorumView, SafekeeperView

safekeeper_app = typer.Typer(help="Show, verify, add, remove or replace safekeepers.")


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    app.add_typer(safekeeper_app, name="safekeeper", no_args_is_help=True)


@safekeeper_app.command("status")
def status(config: ConfigPath = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """Show the proposer and every safekeeper. Exit code 19: the quorum is lost, or a safekeeper has a problem."""
    from walsender_bridge.observability import quorum_view

    seen = quorum_view.observe(configured(config))
    assert seen is not None
    record, output = summary(seen), Output(as_json=as_json)
    if as_json:
        output.record(record)
    else:
        for text in (*record["problems"], *record["notes"]):
            output.note(text)
        for name, row in (("safekeepers", _row), ("positions", _positions)):
            output.rows(name, [row(each) for each in record["safekeepers"]])
        output.record(record["proposer"])
        for name in ("readers", "slots"):
            rows = [{"safekeeper": s["name"], **r} for s in record["safekeepers"] for r in s[name]]
            if rows:
                output.rows(name, rows)
    if record["problems"]:
        raise typer.Exit(int(Cause.UNAVAILABLE))


@safekeeper_app.command("verify")
def verify(
    config: ConfigPath = DEFAULT_CONFIG,
    data_dir: Annotated[
        list[Path] | None,
        typer.Option(
            "--data-dir", help="Verify this data directory instead of the hosted ones. Repeatable."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify and compare the WAL of this machine's safekeepers. Exit code 12: damaged, 10: they differ."""
    from walsender_bridge.observability import safekeeper_verify as verifying

    output = Output(as_json=as_json)
    places = verifying.named(data_dir) if data_dir else verifying.hosted_places(configured(config))
    report = verifying.run(places, output)
    if as_json:
        output.record(report.record)
    else:
        output.rows("safekeepers", report.record["safekeepers"])
        output.record({name: report.record[name] for name in ("compared_bytes", "equal")})
    for error in report.errors:
        output.error(error)
    if report.errors:
        raise typer.Exit(int(report.errors[0].cause))


def configured(config: Any) -> "Config":
    """The configuration. Raises `ConfigError` if it has no safekeepers."""
    settings = load_config(config)
    if not settings.safekeepers.proposed_to:
        if settings.machine is not None:
            need_here(settings, "safekeepers", "bridge")
        raise ConfigError(
            "no safekeepers are configured",
            where=str(config),
            repair="add [safekeepers] with addresses, or local = 3",
        )
    return settings


def summary(seen: "QuorumView") -> dict[str, Any]:
    """A `QuorumView` as plain values."""
    from walsender_bridge.runtime.json_model import plain

    proposer, session = seen.proposer, seen.session
    return {
        "quorum": seen.quorum if seen.proposer_here else None,
        "problems": seen.problems,
        "notes": seen.notes,
        "proposer": {
            "phase": seen.phase if seen.proposer_here else "not on this machine",
            "term": session and session.term,
            "proposer": session and session.proposer,
            "election_epoch": session and session.election_epoch,
            "timeline": session and session.timeline,
            "vcl": session and session.vcl,
            "restart_lsn": session and session.restart_lsn,
            "commit_lsn": proposer and proposer.commit_lsn,
            "end_lsn": session and session.end_lsn,
            "queue_bytes": session and session.queue_bytes,
            "lag_bytes": seen.lag_bytes,
            "membership": session and plain(session.membership),
            "change": session and with_iso_times(plain(session.change), "asked_at"),
            "error": proposer and proposer.error and proposer.error.what,
        },
        "safekeepers": [_safekeeper(each) for each in seen.safekeepers],
    }


def _safekeeper(each: "SafekeeperView") -> dict[str, Any]:
    from walsender_bridge.runtime.json_model import plain

    reported, own, server = each.reported, each.own, each.server
    return {
        "name": each.name,
        "address": each.address,
        "safekeeper": each.identity,
        "state": each.state,
        "member": reported and reported.member,
        "term": own and own.term,
        "election_epoch": own and own.election_epoch,
        "timeline": own and own.timeline,
        "proposer": own and own.proposer,
        "fence": own and own.fence,
        "flush_lsn": each.flush_lsn,
        "commit_lsn": own and own.commit_lsn,
        "restart_lsn": own and own.restart_lsn,
        "begin_lsn": each.begin_lsn,
        "catch_up_target_lsn": reported and reported.catch_up_target_lsn,
        "catch_up_bytes": each.catch_up_bytes,
        "lag_bytes": each.lag_bytes,
        "reads_from": reported and reported.reads_from,
        "fault": (reported and reported.fault) or (own and own.why) or None,
        "wal_bytes": own and own.wal_bytes,
        "wal_limit": own and own.wal_limit,
        "free_bytes": own and own.free_bytes,
        "removed_segments": own and own.removed_segments,
        "readers": [plain(reader) for reader in server.readers] if server else [],
        "slots": [plain(slot) for slot in server.slots] if server else [],
        "archive": own and own.archive and plain(own.archive),
    }


def _row(each: dict[str, Any]) -> dict[str, Any]:
    """The columns that fit on a line."""
    return {
        "name": each["name"],
        "state": each["state"],
        **{name: each[name] for name in ("term", "election_epoch", "lag_bytes")},
        "wal_mb": _megabytes(each["wal_bytes"]),
        "free_mb": _megabytes(each["free_bytes"]),
    }


def _positions(each: dict[str, Any]) -> dict[str, Any]:
    """The LSNs of a safekeeper."""
    names = ("begin_lsn", "restart_lsn", "commit_lsn", "flush_lsn")
    return {"name": each["name"], **{name: each[name] for name in names}}


def _megabytes(value: int | None) -> int | None:
    return None if value is None else value >> 20
