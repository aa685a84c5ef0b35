"""`tuskline log status`: streams with their replicas, consumers, and what delays trimming."""

from typing import Any

import typer

from walsender_bridge.cli.options import DEFAULT_CONFIG, AsJson, ConfigPath, load_config, named_log
from walsender_bridge.runtime.output import Output

_STREAMS = ("stream", "version", "end_offset", "trim_limit", "last_end_lsn", "last_commit_time")
_REPLICAS = ("stream", "address", "in_sync", "state", "term", "version", "lag_bytes", "log_server")
_OFFSETS = (
    *("stream", "address", "low_offset", "committed_end", "end_offset"),
    *("bytes", "disk_bytes"),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("status")(log_status)


def log_status(config: ConfigPath = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """Show streams, replicas, consumers, and what delays trimming.

    Exit code: that of the first fault.
    """
    settings = load_config(config)
    address = named_log(settings, config)
    from walsender_bridge.observability import log_problems, log_view

    seen = log_view.observe(address)
    record, output = log_view.summary(seen), Output(as_json=as_json)
    replicas = log_problems.as_configured(settings, seen.log.streams)
    record["degraded"] = [each for stream in replicas for each in stream.not_joined()]
    faults = log_view.faults(seen)
    if as_json:
        output.record(record)
    else:
        _show(record, output)
        for error in faults:
            output.error(error)
    if faults:
        raise typer.Exit(int(faults[0].cause))


def _show(record: dict[str, Any], output: Output) -> None:
    totals = ("log_id", "version", "published", "forced_version", "retention")
    output.record({name: record[name] for name in totals})
    streams = record["streams"]
    replicas = [{"stream": s["stream"], **each} for s in streams for each in s["replicas"]]
    output.rows("streams", _columns(streams, _STREAMS))
    output.rows("replicas", _columns(replicas, _REPLICAS))
    output.rows("offsets", _columns(replicas, _OFFSETS))
    output.rows("consumers", record["consumers"])
    output.rows("consumers or replicas that hold back trimming", record["holding"])
    for each in replicas:
        if each["reason"]:
            output.note(f"{each['stream']} at {each['address']}: {each['reason']}")
    for text in record["degraded"]:
        output.note(text)


def _columns(rows: list[dict[str, Any]], names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in names} for row in rows]
