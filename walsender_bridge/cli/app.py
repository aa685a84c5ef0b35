"""The command line, `tuskline`. The exit code is the cause of the error (`errors.Cause`).

Each command is a thin call into the part that does the work. A part is imported when its command runs, so
that `tuskline --help` needs neither Spark nor PostgreSQL's client library.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from walsender_bridge.cli import (
    attach,
    certs,
    doctor,
    epochs,
    flush,
    lake_maintain,
    lake_verify,
    log_backup,
    log_rebuild,
    log_status,
    log_tail,
    log_trim,
    log_verify,
    members,
    quarantine,
    quorum,
    reattach,
    report,
    safekeeper,
    slots,
    status,
    verify,
    view,
    wait,
)
from walsender_bridge.cli import table as table_group
from walsender_bridge.cli import up as run
from walsender_bridge.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    lake_section,
    load_config,
    need_here,
)
from walsender_bridge.cli.report import report_file
from walsender_bridge.errors import Cause, TusklineError, UsageError
from walsender_bridge.runtime import disk_full, extras, gc_control, logs
from walsender_bridge.runtime.output import Output
from walsender_bridge.runtime.private_folder import private_folder

if TYPE_CHECKING:
    from walsender_bridge.config import Config

app = typer.Typer(
    name="tuskline",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    # Help texts name configuration sections such as `[metrics]`, which must not be taken for markup.
    rich_markup_mode=None,
)
log_server_app = typer.Typer(help="Run the log server: replicas of the log, and safekeepers.")
bridge_app = typer.Typer(help="Run the bridge, which captures the sources and orders the log.")
lake_app = typer.Typer(help="Run, maintain and verify the lake.")
log_app = typer.Typer(help="Show, verify, follow, trim, back up or rebuild the change log.")
for name, named in (
    ("log-server", log_server_app),
    ("bridge", bridge_app),
    ("lake", lake_app),
    ("log", log_app),
):
    app.add_typer(named, name=name, no_args_is_help=True)

lake_maintain.register(lake_app)
lake_verify.register(lake_app)
for command in (log_status, log_verify, log_trim, log_tail, log_backup, log_rebuild):
    command.register(log_app)
for group in (
    attach,
    certs,
    doctor,
    epochs,
    flush,
    quarantine,
    quorum,
    reattach,
    report,
    run,
    safekeeper,
    members,
    slots,
    status,
    table_group,
    verify,
    view,
    wait,
):
    group.register(app)


def _version(asked: bool) -> None:
    if asked:
        import importlib.metadata

        Output(as_json=False).line(f"tuskline {importlib.metadata.version('tuskline')}")
        raise typer.Exit


@app.callback()
def flags(
    _asked: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version, and exit."
        ),
    ] = False,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set a configuration key; overrides environment and file. Repeatable.",
        ),
    ] = None,
) -> None:
    """Publish the committed changes of a running PostgreSQL as consistent tables in Spark."""
    if assignments:
        from walsender_bridge.config import remember_flags

        remember_flags(assignments)


@log_server_app.command("run")
def log_server_run(
    config: ConfigPath = DEFAULT_CONFIG,
    no_create: Annotated[
        bool,
        typer.Option("--no-create", help="Create no data_dir: one that is missing has been lost."),
    ] = False,
) -> None:
    """Run the log server until SIGTERM or SIGINT. It hosts replicas of the log, and safekeepers if configured."""
    settings = _settings(config)
    need_here(settings, "log-server", "safekeepers")
    extras.need("log-server")
    from walsender_bridge.cli import parts

    parts.log_server(settings, create=not no_create)


@bridge_app.command("run")
def bridge_run(config: ConfigPath = DEFAULT_CONFIG) -> None:
    """Run the bridge until SIGTERM or SIGINT.

    It runs the metadata repository, a capture for each source, and the proposer if safekeepers are configured.
    """
    settings = _settings(config)
    need_here(settings, "bridge", "repository")
    from walsender_bridge.cli import parts

    parts.bridge(settings)


@lake_app.command("run")
def lake_run(config: ConfigPath = DEFAULT_CONFIG) -> None:
    """Run the lake's Spark job until SIGTERM or SIGINT. It copies each table once, then publishes epochs."""
    settings = _settings(config)
    lake_section(settings)
    need_here(settings, "lake")
    extras.need("spark")
    from walsender_bridge.cli import lake_run

    lake_run.run(settings)


def _settings(config: Path) -> "Config":
    """Load the configuration of a part; set up its logging, and make it end with its supervisor."""
    from walsender_bridge.runtime.supervisor import exit_with_parent

    exit_with_parent()
    logs.begin_part()
    settings = load_config(config)
    logs.export_format(settings.logs.format)
    private_folder(settings.data_dir)
    return settings


@app.command()
def metrics(config: ConfigPath = DEFAULT_CONFIG) -> None:
    """Serve /metrics, /healthz and /readyz. If [metrics] is configured, `up` runs this command."""
    settings = _settings(config)
    extras.need("monitor")
    from walsender_bridge.observability.metrics import serve

    serve(settings)


@app.command()
def top(config: ConfigPath = DEFAULT_CONFIG) -> None:
    """Show a live view of processes, lag, epochs and tables."""
    settings = load_config(config)
    extras.need("monitor")
    from walsender_bridge.cli.top import Top

    Top(settings).run()


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(help="Duration of the load, in seconds.", min=5)] = 60.0,
    kill: Annotated[
        bool, typer.Option("--kill", help="Kill each kind of process with SIGKILL during the load.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of the random load and kills.")] = None,
    rate: Annotated[
        float, typer.Option(help="Transactions per second in each database.", min=1)
    ] = 120.0,
    log_servers: Annotated[
        int,
        typer.Option(help="Number of log servers, each with a replica of the log.", min=1, max=5),
    ] = 1,
    safekeepers: Annotated[
        int,
        typer.Option(
            help="Number of safekeepers (1, 3 or 5); commits wait for a majority.", min=0, max=5
        ),
    ] = 0,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby", help="Create a standby, and promote it halfway through the load."
        ),
    ] = False,
    lake: Annotated[
        str,
        typer.Option(
            help="Where the lake is: folder; s3, in a bucket of versitygw, which the demo starts; "
            "or s3://bucket/prefix, with endpoint and keys from the environment."
        ),
    ] = "folder",
    catalog: Annotated[
        str,
        typer.Option(
            metavar="folder|rest",
            help="Where the tables' metadata is: in the lake's folder, or in the REST catalog at TUSKLINE_CATALOG_URI.",
        ),
    ] = "folder",
    directory: Annotated[
        Path | None, typer.Option("--dir", help="New or empty folder for all files.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html", help="Write a page with charts of the run: lag, epochs, kills."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a demonstration on this machine, with its own PostgreSQL.

    Clients write to it concurrently, the log and the lake follow, and at the end every table is compared.
    """
    from walsender_bridge.demo.catalog import section
    from walsender_bridge.demo.run import DemoOptions, run_demo

    if standby and safekeepers:
        raise UsageError(
            "--standby promotes without a failover by the safekeepers, which they would refuse",
            repair="choose one of --standby and --safekeepers; docs/failover.md describes a failover by the safekeepers",
        )
    options = DemoOptions(
        seconds=seconds,
        kill=kill,
        seed=seed,
        rate=rate,
        directory=directory,
        log_servers=log_servers,
        safekeepers=safekeepers,
        standby=standby,
        lake=lake,
        catalog=catalog,
        report=None if report is None else report_file(report),
    )
    section(catalog, lake)  # before anything is started
    output = Output(as_json=as_json)
    result = run_demo(options, output)
    output.record(result)
    if result["invariant_violations"] or result["tables_equal"] != result["tables_compared"]:
        raise typer.Exit(Cause.DIFFERENT)
    verdicts = ("planted_error_found", "segments_equal", "replicas_equal", "promoted")
    if not all(result.get(name, True) for name in verdicts):
        raise typer.Exit(Cause.DIFFERENT)


def main() -> None:
    """The entry point: run the command, and turn an error into its exit code."""
    gc_control.collect_rarely()
    try:
        app()
    except TusklineError as error:
        _fail(error)
    except OSError as error:
        if error.errno not in disk_full.NO_ROOM:
            raise
        _fail(disk_full.of(error))
    except KeyboardInterrupt:
        _fail(UsageError("interrupted"), code=130)


def _fail(error: TusklineError, code: int | None = None) -> None:
    """Report the error, and exit with its cause, or with `code`. A part reports it in its log."""
    if logs.is_part():
        logs.say_error(error)
    else:
        Output(as_json="--json" in sys.argv).error(error)
    # Threads of gRPC or of the JVM's gateway must not hold up a process that has failed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(error.cause) if code is None else code)


if __name__ == "__main__":
    main()
