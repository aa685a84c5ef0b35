"""What Spark runs to read the tables of one epoch by Delta: a statement of SQL for each table, with the version of its log."""

from collections.abc import Mapping

from spark_consumers.lake.catalog.statements import CutTable, quoted
from spark_consumers.lake.delta_log.actions import Shown
from spark_consumers.lake.delta_log.read import version_of
from spark_consumers.lake.manifest.chain import Manifest
from spark_consumers.lake.store.place import Place
from walsender_bridge.errors import TusklineError


def delta_statements(
    root: Place, manifest: Manifest, tables: Mapping[str, CutTable]
) -> tuple[dict[str, str], dict[str, str]]:
    """The statement for each table of the epoch, by name; and why the others, whose logs do not show it, have none."""
    made, without = {}, {}
    for name, table in tables.items():
        folder = root / table.path
        shown = Shown(manifest.link, manifest.epoch, table.snapshot, manifest.term)
        try:
            version = version_of(str(folder), shown.order, table.snapshot, patience=0.0)
        except TusklineError as error:
            without[name] = error.what
        else:
            made[name] = _statement(str(folder), table.view, version)
    return made, without


def _statement(folder: str, view: str, version: int) -> str:
    place = f"delta.{quoted(folder, '`')}"
    return f"CREATE OR REPLACE TEMPORARY VIEW {quoted(view, '`')} AS SELECT * FROM {place} VERSION AS OF {version};"
