"""Views whose files are damaged: the next epoch computes them in new tables. Pure."""

from collections.abc import Mapping
from dataclasses import replace

from spark_consumers.lake.manifest.chain import Manifest
from spark_consumers.lake.manifest.table_version import STALE


def without_damaged(head: Manifest, reasons: Mapping[str, str]) -> Manifest:
    """The head with those views stale whose tables, by path, are damaged: the next epoch computes them in new ones."""
    views = {
        name: replace(
            view,
            digest="",
            reason=reasons[view.table.path],
            table=replace(
                view.table,
                state=STALE,
                as_of=view.table.as_of or head.epoch,
                reason=reasons[view.table.path],
            ),
        )
        if view.table is not None and view.table.path in reasons
        else view
        for name, view in head.views.items()
    }
    return replace(head, views=views) if views != head.views else head
