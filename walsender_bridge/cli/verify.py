"""`tuskline verify`: the proof of equality. Starts a Spark of its own, beside the one of `lake run`."""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from walsender_bridge.cli.lake_session import lake_session
from walsender_bridge.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    lake_section,
    load_config,
)
from walsender_bridge.errors import Cause, UnavailableError, UsageError
from walsender_bridge.observability.lake_chain import lake_chain, store_options
from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.runtime.output import Output

if TYPE_CHECKING:
    from spark_consumers.lake.equality.record import Difference, EqualityRecord, TableRecord
    from spark_consumers.lake.equality.run import Values
    from spark_consumers.lake.manifest.chain import Chain
    from walsender_bridge.config import Config


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("verify")(verify)


def verify(
    config: ConfigPath = DEFAULT_CONFIG,
    tables: Annotated[
        list[str] | None,
        typer.Option(
            "--tables",
            metavar="TABLE",
            help="stream.schema.table, or schema.table if only one table has that name. May be repeated; default: all tables.",
        ),
    ] = None,
    sample: Annotated[
        float,
        typer.Option(help="Fraction of the chunks to compare, chosen at random.", min=0.0, max=1.0),
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the choice; default: random.")] = None,
    load: Annotated[
        float,
        typer.Option(
            help="Fraction of the time in which the source is queried, by one connection.",
            min=0.01,
            max=1.0,
        ),
    ] = 0.5,
    snapshot_seconds: Annotated[
        float,
        typer.Option(
            help="Seconds to hold a snapshot of the source, at most; the chunks that are left are compared at another one.",
            min=10.0,
        ),
    ] = 600.0,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Begin again instead of continuing a run that ended early."),
    ] = False,
    show_values: Annotated[
        bool,
        typer.Option("--values", help="Show the values of rows that differ. They may be secrets."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare the rows of the lake with those of the sources.

    Both are read at exact cuts; the sources may be written to meanwhile. Exit code 21: rows differ; 19: a table was not compared. See docs/verify.md.
    """
    settings = load_config(config)
    lake = lake_section(settings)
    from spark_consumers.lake.comparison.source import Load
    from spark_consumers.lake.equality.run import Watch
    from spark_consumers.lake.equality.run import verify as run
    from spark_consumers.lake.tables.sources import Source
    from walsender_bridge.cli.parts import alone
    from walsender_bridge.observability.verify_bar import verify_bar

    output = Output(as_json=as_json)
    if sample == 0.0:
        raise UsageError(
            "--sample must be greater than 0", repair="specify a fraction, such as 0.1"
        )
    with alone("verify", [settings.run_dir]):
        record = _begun(settings, tables or (), sample, seed, output, restart=restart)
        shown: list[Values] = []
        with lake_session(settings, "tuskline-verify") as spark, verify_bar(output) as progress:
            watch = Watch(
                progress=progress,
                waiting=lambda awaited: (
                    output.note(f"waiting for {awaited.text}") if awaited else None
                ),
                values=shown.append if show_values else None,
            )
            record = run(
                spark,
                lake.uri,
                settings.log_address,
                [Source(s.name, s.dsn, s.publication_name) for s in settings.source],
                record,
                Load(load, snapshot_seconds, lake.copy_rate),
                watch=watch,
                store=store_options(lake),
            )
    _report(output, record, shown)


def _begun(
    settings: "Config",
    tables: Sequence[str],
    sample: float,
    seed: int | None,
    output: Output,
    *,
    restart: bool,
) -> "EqualityRecord":
    """The run that is to be continued, or a new one."""
    from spark_consumers.lake.equality.record import read_record
    from spark_consumers.lake.equality.run import begin
    from walsender_bridge.cli.table import full_names

    chain: Chain = lake_chain(lake_section(settings))
    names = tuple(full_names(settings, tables))
    last = None if restart else read_record(chain)
    wanted = (0.0, names, sample)
    if (
        last is not None
        and (last.ended_at, last.names, last.sample) == wanted
        and seed in {None, last.seed}
    ):
        done = sum(len(table.done) for table in last.tables.values())
        output.note(f"continuing the run that ended early: {done} chunks are compared")
        return last
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    if sample < 1:
        output.note(f"comparing {sample:.1%} of the chunks of each table, with --seed {seed}")
    return begin(chain, [source.name for source in settings.source], names, sample, seed)


def _report(output: Output, record: "EqualityRecord", shown: "Sequence[Values]") -> None:
    """Print the result. Exits with 21 if rows differ; raises `UnavailableError` if a table was not compared."""
    from spark_consumers.lake.equality.record import DIFFERENT, NOT_COMPARED

    rows = [_row(name, table) for name, table in record.tables.items()]
    differences = [
        {"table": name, **_plain(each)}
        for name, table in record.tables.items()
        for each in table.differences
    ]
    if output.as_json:
        values = [
            {"table": v.table, "key": dict(v.key), "source": v.source, "lake": v.lake}
            for v in shown
        ]
        found: dict[str, Any] = {"tables": rows, "differences": differences}
        output.record({**found, "seed": record.seed, **({"values": values} if shown else {})})
    else:
        output.rows("tables", [{n: v for n, v in row.items() if n != "reason"} for row in rows])
        for row in rows:
            if row["reason"]:
                output.note(f"{row['table']}: {row['reason']}")
        for each in differences:
            output.line(_line(each))
        for v in shown:
            output.line(f"{v.table} {dict(v.key)}: source {v.source}, lake {v.lake}")
    if record.count(DIFFERENT):
        raise typer.Exit(Cause.DIFFERENT)
    if missing := [n for n, t in record.tables.items() if t.state == NOT_COMPARED]:
        raise UnavailableError(
            f"{len(missing)} of {len(record.tables)} tables were not compared: {', '.join(missing[:10])}",
            where=str(lake_name(record)),
            repair="`tuskline table list` shows the states of tables; the reasons are above",
        )


def lake_name(record: "EqualityRecord") -> str:
    """The tables of the run, as an error names them."""
    return ", ".join(record.names) or "all tables"


def _row(name: str, table: "TableRecord") -> dict[str, Any]:
    return {
        "table": name,
        "result": table.state,
        "rows": table.rows,
        "chunks": table.chunks,
        "different_chunks": table.different_chunks,
        "quarantined_rows": table.beyond,
        "cuts": table.cuts,
        "lsn": format_lsn(table.lsn) if table.lsn else None,
        "reason": table.reason,
    }


def _plain(each: "Difference") -> dict[str, Any]:
    return {
        "difference": each.kind,
        "key": dict(each.key),
        "columns": list(each.columns),
        "source_rows": each.source_rows,
        "lake_rows": each.lake_rows,
        "lsn": format_lsn(each.lsn),
        "epoch": each.epoch,
    }


def _line(each: dict[str, Any]) -> str:
    key = ", ".join(f"{name}={value}" for name, value in each["key"].items())
    what = {
        "missing": "is not in the lake",
        "extra": "is only in the lake",
        "changed": f"differs in {', '.join(each['columns'])}",
        "count": f"is {each['source_rows']} times at the source, and {each['lake_rows']} times in the lake",
        "chunk": "differs; its rows could not be read again at the same cut",
    }[each["difference"]]
    return f"{each['table']} ({key}) {what} (source at {each['lsn']}, epoch {each['epoch']})"
