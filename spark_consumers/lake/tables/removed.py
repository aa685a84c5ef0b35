"""What becomes of the tables of a source that the configuration does not name any more.

They stay readable as they were at the last epoch that the source was part of, in the state `left`, like tables
that have left their publication. Nothing holds the log for the source from then on, so its stream has no
position in the lake: if it is named again, it begins where the log is then, and its tables are copied again.
"""

from collections.abc import Collection
from dataclasses import replace

from spark_consumers.lake.manifest.chain import LEFT, Manifest
from spark_consumers.lake.tables import states
from spark_consumers.lake.tables.states import stream_of


def departed(head: Manifest, sources: Collection[str]) -> list[str]:
    """The names of the tables of `head`, copies included, that follow a source other than these."""
    going = {name for name, table in head.tables.items() if table.state != LEFT}
    return sorted(name for name in going | set(head.copies) if stream_of(name) not in sources)


def without_departed(head: Manifest, sources: Collection[str]) -> Manifest:
    """`head` in which only the tables of these sources continue; a copy that was never shown is dropped."""
    for stream in set(head.streams) - set(sources):
        head = states.without(head, (), stream)
    streams = {stream: at for stream, at in head.streams.items() if stream in sources}
    return replace(head, streams=streams)
