"""What decoders' files on two servers say: the standby's may lack nothing that the primary's have.

Snapshots at the same position: no transaction may be missing in them. Mapping files of rewritten catalogs: none, nor a byte
of one, from a slot's restart_lsn on.

A file has a header, the builder as it was in memory, and the transactions that changed the catalog: those that have
committed, and from 16 on those in progress. What lies before the builder's xmin is not asked of it.
"""

import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.support.slot_copies import Pair, fields
from walsender_bridge.postgres.protocol.lsn import parse_lsn

SNAPSHOTS = "pg_logical/snapshots"
MAPPINGS = "pg_logical/mappings"
_HEADER = 16
_XMIN = 16
_COUNT = struct.Struct("<Q")
#: The struct SnapBuild begins to differ by major: (from this one on, where `committed` is, its size).
_BUILDERS = ((16, 80, 128), (14, 80, 112), (0, 96, 128))
#: From `committed` to `catchange`, which is its neighbor.
_IN_PROGRESS = 32
_FIRST_WITH_IN_PROGRESS = 16


class Snapshot(NamedTuple):
    xmin: int
    committed: frozenset[int]
    in_progress: frozenset[int]


def read(path: Path, major: int) -> Snapshot:
    """A snapshot, on a machine of 64 bits and little endian."""
    data = path.read_bytes()
    committed_at, size = next(rest for first, *rest in _BUILDERS if major >= first)
    (xmin,) = struct.unpack_from("<I", data, _HEADER + _XMIN)
    (committed,) = _COUNT.unpack_from(data, _HEADER + committed_at)
    in_progress = 0
    if major >= _FIRST_WITH_IN_PROGRESS:
        (in_progress,) = _COUNT.unpack_from(data, _HEADER + committed_at + _IN_PROGRESS)
    assert len(data) == _HEADER + size + 4 * (committed + in_progress), path
    xids = struct.unpack_from(f"<{committed + in_progress}I", data, _HEADER + size)
    return Snapshot(xmin, frozenset(xids[:committed]), frozenset(xids[committed:]))


def lacking(pair: Pair, *, anybodys: bool = False) -> set[int]:
    """The transactions that the standby's snapshots lack at positions of which the primary has one, too.

    Those that `advance` wrote, with which copies start; or `anybodys`.
    """
    found: set[int] = set()
    for path in (pair.standby.data_dir / SNAPSHOTS).glob("*.snap"):
        there = pair.primary.data_dir / SNAPSHOTS / path.name
        if not (anybodys or path.with_name(f"{path.name}.tuskline").exists()):
            continue
        with suppress(FileNotFoundError):  # a checkpoint removes those that no slot needs
            ours, theirs = read(path, pair.major), read(there, pair.major)
            known = ours.committed | ours.in_progress
            found |= {xid for xid in theirs.committed if xid >= ours.xmin} - known
            found |= theirs.in_progress - known
    return found


def mappings_lacking(pair: Pair, name: str) -> set[str]:
    """The mapping files that the standby lacks, or has less of than the primary, of what the slot's copy may need.

    Where there is no copy yet: of what one with the slot's own position would need.
    """
    first = pair.slot(name).restart_lsn
    with suppress(IndexError):
        first = fields(pair.standby, name).restart_lsn
    there = {}
    for path in (pair.primary.data_dir / MAPPINGS).glob("map-*"):
        if parse_lsn(path.name.split("-")[3].replace("_", "/")) >= parse_lsn(first):
            with suppress(FileNotFoundError):  # a checkpoint removes those that no slot needs
                there[path.name] = path.read_bytes()
    if there:
        pair.catch_up()
    here = pair.standby.data_dir / MAPPINGS
    return {
        file
        for file, content in there.items()
        if not ((here / file).exists() and (here / file).read_bytes().startswith(content))
    }
