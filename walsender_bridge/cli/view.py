"""`tuskline view`: the views of the lake, and how each is kept."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from walsender_bridge.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    lake_section,
    load_config,
)
from walsender_bridge.errors import ConfigError, LakeError, NotSupportedError, UsageError
from walsender_bridge.observability.lake_chain import lake_chain
from walsender_bridge.runtime.output import Output

if TYPE_CHECKING:
    from spark_consumers.lake.manifest.chain import Manifest
    from spark_consumers.lake.manifest.view_version import ViewVersion
    from spark_consumers.lake.views.definition import ViewDefinition
    from walsender_bridge.config.sections import LakeSection

view_app = typer.Typer(
    help="List the views of the lake, and explain how each is kept.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    app.add_typer(view_app, name="view")


def view_definitions(lake: "LakeSection") -> "list[ViewDefinition]":
    """The configured views. Raises `ConfigError` for a file that cannot be read."""
    from spark_consumers.lake.views.definition import ViewDefinition

    found = []
    for section in lake.view:
        sql = section.sql
        if section.file is not None:
            try:
                sql = section.file.read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"the SQL of view {section.name} cannot be read: {error}",
                    where=str(section.file),
                    repair="correct its file in [[lake.view]]",
                ) from None
        assert sql is not None
        found.append(ViewDefinition(section.full_name, sql, section.timeout, section.max_rows))
    return found


@view_app.command("list")
def list_views(config: ConfigPath = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """List the views of the newest epoch, and those of the configuration that it does not have yet."""
    lake = lake_section(load_config(config))
    head = lake_chain(lake).head()
    there = {} if head is None else head.views
    names = [view.name for view in view_definitions(lake)]
    rows = [_row(name, there.get(name), head) for name in dict.fromkeys([*names, *there])]
    Output(as_json=as_json).rows("views", rows)


def _row(name: str, view: "ViewVersion | None", head: "Manifest | None") -> dict[str, Any]:
    """A view of the newest epoch; one that it does not have yet is `new`."""
    table = None if view is None else view.table
    if head is None or view is None:
        return {
            "view": name,
            "state": "new",
            "kept": None,
            "rows": None,
            "as_of": None,
            "reason": "",
        }
    return {
        "view": name,
        "state": "refused" if table is None else table.state,
        "kept": view.kind or None,
        "rows": None if table is None else table.rows,
        "as_of": None if table is None else table.as_of or head.epoch,
        "reason": view.reason,
    }


@view_app.command()
def explain(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of a view in the configuration.")
    ],
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Show how a view is kept, and why: incrementally or recomputed; its tables, columns and SQL on Spark.

    The SQL is checked against the tables of the newest epoch, before `tuskline lake run` is started with it.
    """
    from spark_consumers.lake.views.plan import unreadable
    from spark_consumers.lake.views.translate import base_tables, translate

    lake = lake_section(load_config(config))
    found = [
        view for view in view_definitions(lake) if name in {view.name, view.name.partition(".")[2]}
    ]
    if len(found) != 1:
        known = ", ".join(view.name for view in view_definitions(lake)) or "none"
        raise UsageError(
            f"{name!r} is not the name of exactly one view", repair=f"configured are: {known}"
        )
    head = lake_chain(lake).head()
    if head is None:
        raise LakeError(
            "no epoch is published yet", repair="check that `tuskline lake run` is running"
        )
    try:
        made = translate(found[0].sql, base_tables(head.tables))
    except NotSupportedError as error:
        raise NotSupportedError(error.what, where=found[0].name, repair=error.repair) from None
    kept = "recomputed" if made.incremental is None else "incremental"
    columns = [field.name for field in made.columns if field.name not in made.hidden]
    output = Output(as_json=as_json)
    output.record(
        {
            "view": found[0].name,
            "kept": kept,
            "why": made.why,
            "tables": list(made.tables) if as_json else ", ".join(made.tables),
            "columns": columns if as_json else ", ".join(columns),
            "held_back_by": unreadable(made.tables, head.tables) or None,
            "spark_sql": made.query,
        }
    )
