"""`tuskline log rebuild`: a lost metadata repository, rebuilt from the replicas."""

from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from walsender_bridge.cli.log_trim import duration
from walsender_bridge.cli.options import DEFAULT_CONFIG, AsJson, ConfigPath, load_config, need_here
from walsender_bridge.errors import UsageError
from walsender_bridge.runtime.output import Output

if TYPE_CHECKING:
    from walsender_bridge.change_log.repository.core import Repository
    from walsender_bridge.change_log.repository.rebuild import RebuildPlan
    from walsender_bridge.change_log.repository.rebuilder import Rebuilder
    from walsender_bridge.config import Config

#: The longest lease that a consumer can have had.
_HOLD = "10d"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("rebuild")(log_rebuild)


def log_rebuild(
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without",
            metavar="ADDRESS",
            help="Give up this log server, which is lost for good. Repeatable; name fewer than min_replicas.",
        ),
    ] = None,
    stopped: Annotated[
        list[str] | None,
        typer.Option(
            "--stopped",
            metavar="ADDRESS",
            help="Take the repository at this address to be stopped, although its machine does not answer or rejects connections. Repeatable.",
        ),
    ] = None,
    hold: Annotated[
        str,
        typer.Option(
            help="Trim nothing for this long, such as 10d or 12h, so that consumers can renew their leases; 0: trim at once."
        ),
    ] = _HOLD,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be written; change nothing.")
    ] = False,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Rebuild a lost repository of the log from its replicas.

    Use it after the repository's disk, or the data of etcd, was lost. Run it on the repository's machine, while all log
    servers run and no repository does. It fails if a repository exists.
    """
    seconds = duration(hold)
    if seconds > duration(_HOLD):
        raise UsageError(f"{hold} is longer than any lease", repair=f"use --hold {_HOLD} or less")
    settings, output = load_config(config), Output(as_json=as_json)
    need_here(settings, "repository")
    _refuse_running(settings, stopped or [])
    from walsender_bridge.change_log.repository import empty_store
    from walsender_bridge.change_log.repository.etcd import EtcdSettings

    cluster = EtcdSettings.of(settings.etcd) if settings.etcd else None
    file = settings.repository_dir / "repository.sqlite"
    with closing(_rebuilder(settings, without or [], output)) as rebuilder:
        if dry_run:
            empty_store.check(file, cluster)
            _show(_record(rebuilder.look(), rebuilder, None), output)
            return
        with empty_store.opened(file, cluster) as store:
            plan = rebuilder.look()
            state = rebuilder.rebuild(plan, hold=seconds)
            store.begin_with(state)
        _show(_record(plan, rebuilder, state), output)


def _refuse_running(settings: "Config", stopped: list[str]) -> None:
    from walsender_bridge.change_log.repository import rebuilder
    from walsender_bridge.runtime import pid_file

    for part in ("up", "bridge"):
        pid_file.refuse_while_running(settings.run_dir, part)
    log_servers = [each.listen for each in settings.log_server]
    rebuilder.refuse_running(settings.repository_listens, stopped, log_servers)


def _rebuilder(settings: "Config", given_up: list[str], output: Output) -> "Rebuilder":
    from walsender_bridge.change_log.repository.membership import ReplicationPolicy
    from walsender_bridge.change_log.repository.rebuilder import Rebuilder

    policy = ReplicationPolicy(settings.replicas, settings.min_replicas)
    addresses = [each.listen for each in settings.log_server]
    return Rebuilder(addresses, policy, given_up=given_up, tls=settings.tls_files, say=output.note)


def _record(
    plan: "RebuildPlan", rebuilder: "Rebuilder", built: "Repository | None"
) -> dict[str, Any]:
    """What was found and decided. `built`: the state that was written; None: nothing was."""
    return {
        "log_id": plan.log_id,
        "newest_version": plan.version,
        "version": plan.fence,
        "written": built is not None,
        "log_servers": [
            {
                "address": each.address,
                "log_server": each.log_server or None,
                "streams": [o.stream for o in rebuilder.offers if o.log_server == each.log_server],
            }
            for each in rebuilder.servers
        ],
        "streams": [
            {
                "stream": each.stream,
                "low_offset": each.low_offset,
                "end_offset": each.end,
                "term": each.term,
                "members": [*(built.streams[each.stream].members if built else each.members)],
                "behind": [*each.behind],
            }
            for each in plan.streams
        ],
    }


def _show(record: dict[str, Any], output: Output) -> None:
    if output.as_json:
        output.record(record)
        return
    log_servers, streams = record.pop("log_servers"), record.pop("streams")
    output.record(record)
    output.rows("log servers", log_servers)
    output.rows("streams", streams)
