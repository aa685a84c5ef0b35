"""`tuskline safekeeper`: how the safekeepers are, and whether what they hold is whole and the same."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from walsender_bridge.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    load_config,
)
from walsender_bridge.errors import Cause, ConfigError
from walsender_bridge.runtime.output import Output
from walsender_bridge.runtime.times import with_iso_times

if TYPE_CHECKING:
    from walsender_bridge.config import Config

safekeeper_app = typer.Typer(help="Safekeepers: WAL on a quorum before COMMIT returns.")


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    app.add_typer(safekeeper_app, name="safekeeper", no_args_is_help=True)


@safekeeper_app.command("status")
def status(config: ConfigPath = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """The proposer and every safekeeper. Exit code 19 when a quorum is lost, or one is not as it should be."""
    from walsender_bridge.observability import quorum_view

    seen = quorum_view.look(configured(config))
    assert seen is not None
    record, output = summary(seen), Output(as_json=as_json)
    if as_json:
        output.record(record)
    else:
        for word in (*record["ill"], *record["notes"]):
            output.note(word)
        for name, row in (("safekeepers", _row), ("positions", _positions)):
            output.rows(name, [row(each) for each in record["safekeepers"]])
        output.record(record["proposer"])
        for name in ("readers", "slots"):
            rows = [{"safekeeper": s["name"], **r} for s in record["safekeepers"] for r in s[name]]
            if rows:
                output.rows(name, rows)
    if record["ill"]:
        raise typer.Exit(int(Cause.UNAVAILABLE))


@safekeeper_app.command("verify")
def verify(
    config: ConfigPath = DEFAULT_CONFIG,
    data_dir: Annotated[
        list[Path] | None,
        typer.Option(
            "--data-dir", help="This data directory, instead of the hosted ones; repeatable."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read all that the safekeepers here hold, and compare it. Exit code 12: damaged, 10: they differ."""
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
    """The configuration, with safekeepers in it. Raises `ConfigError`."""
    settings = load_config(config)
    if not settings.safekeepers.proposed_to:
        raise ConfigError(
            "no safekeepers are configured",
            where=str(config),
            repair="add [safekeepers] with addresses, or local = 3",
        )
    return settings


def summary(seen: Any) -> dict[str, Any]:
    """A `QuorumView` as plain values."""
    told = seen.proposer
    return {
        "quorum": seen.quorum if seen.proposer_here else None,
        "ill": seen.ill,
        "notes": seen.shorter,
        "proposer": {
            "phase": seen.phase if seen.proposer_here else "not on this machine",
            **{
                name: told.get(name)
                for name in ("term", "proposer", "election_epoch", "timeline", "vcl", "restart_lsn")
            },
            **{name: told.get(name) for name in ("commit_lsn", "end_lsn", "queue_bytes")},
            "lag_bytes": seen.lag_bytes,
            "membership": told.get("membership"),
            "change": with_iso_times(told["change"], "asked_at") if told.get("change") else None,
            "error": (told.get("error") or {}).get("what"),
        },
        "safekeepers": [_safekeeper(each) for each in seen.safekeepers],
    }


def _safekeeper(each: Any) -> dict[str, Any]:
    told, own, server = each.told, each.own, each.server
    return {
        "name": each.name,
        "address": each.address,
        "safekeeper": own.get("safekeeper") or told.get("safekeeper"),
        "state": each.state,
        "member": told.get("member"),
        **{
            name: own.get(name)
            for name in ("term", "election_epoch", "timeline", "proposer", "fence")
        },
        "flush_lsn": each.flush_lsn,
        **{name: own.get(name) for name in ("commit_lsn", "restart_lsn")},
        "begin_lsn": each.begin_lsn,
        "catch_up_target_lsn": told.get("catch_up_target_lsn"),
        "catch_up_bytes": each.catch_up_bytes,
        "lag_bytes": told.get("lag_bytes"),
        "reads_from": told.get("reads_from"),
        "fault": told.get("fault") or own.get("why") or None,
        **{name: own.get(name) for name in ("wal_bytes", "wal_limit", "free_bytes")},
        "removed_segments": own.get("removed_segments"),
        "readers": server.get("readers", []),
        "slots": server.get("slots", []),
        "archive": own.get("archive"),
    }


def _row(each: dict[str, Any]) -> dict[str, Any]:
    """What fits on a line."""
    return {
        "name": each["name"],
        "state": each["state"],
        **{name: each[name] for name in ("term", "election_epoch", "lag_bytes")},
        "wal_mb": _megabytes(each["wal_bytes"]),
        "free_mb": _megabytes(each["free_bytes"]),
    }


def _positions(each: dict[str, Any]) -> dict[str, Any]:
    """Its LSNs."""
    names = ("begin_lsn", "restart_lsn", "commit_lsn", "flush_lsn")
    return {"name": each["name"], **{name: each[name] for name in names}}


def _megabytes(value: int | None) -> int | None:
    return None if value is None else value >> 20
