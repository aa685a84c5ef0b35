"""What becomes of the tables of a source that the configuration does not name any more.

They stay readable as they were at the last epoch that the source was part of, in the state `left`, like tables
that have left their publication. Nothing holds the log for the source from then on, so its stream has no
position in the lake: if it is named again, it begins where the log is then, and its tables are copied anew.
"""

from collections.abc import Collection
from dataclasses import replace

from spark_consumers.lakehouse.manifest import COPIED, LEFT, LIVE, Manifest


def departed(head: Manifest, sources: Collection[str]) -> list[str]:
    """The tables of `head` that go on with their source, and whose source is none of these, by name."""
    return sorted(
        name
        for name, table in head.tables.items()
        if table.state in {LIVE, COPIED} and name.partition(".")[0] not in sources
    )


def without_departed(head: Manifest, sources: Collection[str]) -> Manifest:
    """`head` as the next epoch is to follow it: with the tables of these sources alone going on."""
    gone = set(departed(head, sources))
    tables = {
        # A copy that no epoch has shown was never whole together with the others.
        name: replace(table, state=LEFT) if name in gone else table
        for name, table in head.tables.items()
        if not (name in gone and table.state == COPIED)
    }
    streams = {stream: at for stream, at in head.streams.items() if stream in sources}
    return replace(head, tables=tables, streams=streams)
