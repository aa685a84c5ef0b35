"""Every file of a lake compared with its checksums, and its rows with what its newest manifest tells; without Spark.

Invariants. Nothing is changed. A lake that is written to meanwhile causes no error: a file's checksums are removed
before the file, so checksums without their file mean a loss, and a file that disappeared with its checksums was
removed.
"""

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from spark_consumers.lake.catalog.links import folders
from spark_consumers.lake.catalog.open_catalog import for_reading
from spark_consumers.lake.catalog.table_catalog import TableCatalog, TableId
from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.counted import count
from spark_consumers.lake.format.iceberg_files import metadata_file, versions_in
from spark_consumers.lake.format.read_through import read_through
from spark_consumers.lake.format.table_format import ROW_ID
from spark_consumers.lake.manifest.chain import Chain, Manifest, TableVersion
from spark_consumers.lake.manifest.newest import PublishedLink, is_lost, lost
from spark_consumers.lake.manifest.pinned_links import PinnedLinks
from spark_consumers.lake.store.place import Place, below, is_object, place
from walsender_bridge.errors import CorruptError, TusklineError

_INDEX_REPAIR = (
    "no action is needed: the lake's driver builds the table's row index again when it needs it"
)
_PIN_REPAIR = "restore it from a backup, or release the pin: tuskline epochs unpin"
#: Seconds that a file gets its checksums within: an executor or the driver makes them in the next step.
_BEING_WRITTEN = 60.0
#: Which file (relative to the lake), how many of how many.
Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class VerifyResult:
    """What was read. `unsealed`: files without checksums, which an older version wrote, or which a power failure took."""

    links: int = 0
    files: int = 0
    bytes: int = 0
    unsealed: int = 0
    errors: list[TusklineError] = field(default_factory=list)


def verify(chain: Chain, progress: Progress) -> VerifyResult:
    """Read everything. Raises `LakeError` if there is no lake; what is damaged is in the result."""
    found = VerifyResult()
    root = chain.root
    chain.identity()
    catalog = for_reading(chain)
    newest: Manifest | None = None
    recorded = _recorded(chain, found)
    for number in chain.numbers():
        try:
            manifest = chain.at_link(number)
        except TusklineError as error:
            found.errors.append(error)
            continue
        if manifest is not None:
            newest = manifest
            found.links += 1
    if recorded is not None and is_lost(recorded, newest):
        found.errors.append(lost(recorded, newest, chain.where(recorded)))
    for number in chain.missing():
        where = chain.where(PublishedLink(number, 0, 0))
        found.errors.append(CorruptError(f"link {number} was published and is lost", where=where))
    if newest is not None:
        found.errors += _lost_snapshots(root, catalog, newest.versions)
        found.errors += _lost_pins(chain, catalog, newest)
        found.errors += _lost_runs(chain, root, newest)
    found.errors += _wrong_hints(root)
    files = sorted(_files(root))
    unsealed = []
    for done, file in enumerate(files):
        progress(below(file, root), done, len(files))
        if not _verify_file(file, found):
            unsealed.append(file)
    found.unsealed = sum(map(_is_unsealed, unsealed))
    if newest is not None:
        found.errors += list(
            _miscounted(chain, catalog, newest, [error.where for error in found.errors])
        )
    return found


def _recorded(chain: Chain, found: VerifyResult) -> PublishedLink | None:
    """Before the chain is read, which may grow meanwhile."""
    try:
        return chain.recorded_newest()
    except CorruptError as error:
        found.errors.append(error)
        return None


def _files(root: Place) -> Iterator[Place]:
    """The files of all tables, and those that checksums say were there."""
    places = [
        table / name
        for table in folders(root)
        for name in ("metadata", "data", "quarantine", "index")
    ]
    for file in (file for folder in places for file in folder.glob("*")):
        sealed = checksums.file_of(file)
        if sealed is not None and not sealed.exists():
            yield sealed
        elif not file.name.startswith(".") and file.name != "version-hint.text":
            yield file


def _verify_file(file: Place, found: VerifyResult) -> bool:
    """Verify it; whether it could be compared, or is none any more."""
    try:
        sealed = checksums.check(file)
        if is_object(file):
            read_through(file)
        found.files += 1
        found.bytes += file.stat().st_size
        return sealed or is_object(file)
    except CorruptError as error:
        if file.exists() or checksums.sums_of(file).exists():
            repair = _INDEX_REPAIR if file.parent.name == "index" else error.repair
            found.errors.append(CorruptError(error.what, where=error.where, repair=repair))
    except FileNotFoundError:
        return True
    except OSError as error:
        found.errors.append(
            CorruptError(f"the file cannot be read: {error.strerror}", where=str(file))
        )
    return True


def _is_unsealed(file: Place) -> bool:
    """Whether a file that had no checksums still has none, and is not just being written: it gets them once it has its name."""
    try:
        age = time.time() - file.stat().st_mtime_ns / 1e9
    except FileNotFoundError:
        return False
    return not 0 <= age < _BEING_WRITTEN and not checksums.sums_of(file).exists()


def _wrong_hints(root: Place) -> Iterator[TusklineError]:
    """Hints at metadata that is not there: Iceberg does not open such a table. One that is no number counts for nothing."""
    for hint in (folder / "metadata" / "version-hint.text" for folder in folders(root)):
        text = _text(hint)
        if text is None or not text.strip().isdecimal():
            continue
        named = metadata_file(hint.parent, int(text))
        # Written again meanwhile, it named one that was removed since.
        if not named.exists() and _text(hint) == text:
            yield CorruptError(
                f"it names version {int(text)} of the table, which does not exist",
                where=str(hint),
                repair="remove it: it only saves readers from listing the folder",
            )


def _text(file: Place) -> str | None:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return None


def _lost_pins(chain: Chain, catalog: TableCatalog | None, newest: Manifest) -> list[TusklineError]:
    """Pinned epochs whose links or snapshots are not there, unless they have been released meanwhile."""
    found: dict[str, list[TusklineError]] = {}
    for name, pin in newest.pins.items():
        try:
            link = PinnedLinks(chain.store).read(pin.record)
            found[name] = list(_lost_snapshots(chain.root, catalog, link.readable.values()))
        except CorruptError as error:
            found[name] = [error]
    head = chain.head() if any(found.values()) else None
    pins = head.pins if head is not None else {}
    return [
        CorruptError(f"pin {name}: {error.what}", where=error.where, repair=_PIN_REPAIR)
        for name, errors in found.items()
        if name in pins and pins[name].keeps_tags
        for error in errors
    ]


def _lost_snapshots(
    root: Place, catalog: TableCatalog | None, tables: Iterable[TableVersion]
) -> Iterator[TusklineError]:
    """Tables of an epoch whose own metadata does not have the snapshot."""
    for table in tables:
        try:
            lists = _manifest_list(root / table.path, catalog, table.snapshot_id)
        except CorruptError as error:
            yield error
            continue
        if not lists.exists():
            yield CorruptError("the manifest list is missing", where=str(lists))


def _lost_runs(chain: Chain, root: Place, manifest: Manifest) -> list[TusklineError]:
    """Runs of the row index that are not there, unless a newer link needs them no more."""
    files = [root / table.path / name for table in manifest.versions for name in table.index_files]
    lost = [file for file in files if not file.exists()]
    head = chain.head() if lost else None
    if head is None or head.link != manifest.link:
        return []
    return [
        CorruptError("the file is missing", where=str(file), repair=_INDEX_REPAIR) for file in lost
    ]


def _manifest_list(table: Place, catalog: TableCatalog | None, snapshot: int) -> Place:
    """Of the table in this folder. Raises `CorruptError`, and `UnavailableError` for a catalog that does not answer."""
    content, where = _newest_metadata(table, catalog)
    try:
        metadata = json.loads(content) if isinstance(content, bytes) else content
        snapshots = {each["snapshot-id"]: each for each in metadata["snapshots"]}
        return place(snapshots[snapshot]["manifest-list"])
    except (ValueError, KeyError, TypeError):
        raise CorruptError(
            f"snapshot {snapshot} is not in the table's metadata", where=where
        ) from None


def _newest_metadata(
    table: Place, catalog: TableCatalog | None
) -> tuple[bytes | Mapping[str, Any], str]:
    """The newest metadata of the table in this folder, or its file's content; and where it is."""
    if catalog is None:
        versions = versions_in(table / "metadata")
        if versions:
            newest = metadata_file(table / "metadata", versions[-1])
            return newest.read_bytes(), str(newest)
    elif (there := catalog.load(TableId.at(str(table)))) is not None:
        return there.metadata, there.location
    raise CorruptError("the table has no metadata", where=str(table))


def _miscounted(
    chain: Chain, catalog: TableCatalog | None, manifest: Manifest, damaged: Collection[str]
) -> Iterator[TusklineError]:
    """Tables of this link that have other rows than it tells, except where files are known to be damaged."""
    for name, table in [*manifest.readable.items(), *manifest.copies.items()]:
        folder = str(chain.root / table.path)
        readers = [where for where in damaged if not where.startswith(f"{folder}/index/")]
        if any(where == folder or where.startswith(f"{folder}/") for where in readers):
            continue
        repair = f"copy it again: tuskline table resync {name}"
        try:
            lists = _manifest_list(place(folder), catalog, table.snapshot_id)
            there = count(lists, list(table.key) or [ROW_ID])
        except (CorruptError, FileNotFoundError) as error:
            # Retention may have taken what this link needed, and then the link.
            if chain.has(manifest.link):
                what = error.what if isinstance(error, CorruptError) else "a file is missing"
                where = error.where if isinstance(error, CorruptError) else str(error.filename)
                yield CorruptError(what, where=where, repair=repair)
            continue
        if there != table.rows:
            yield CorruptError(
                f"its manifest has {table.rows} rows at epoch {manifest.epoch}, but its files have {there}",
                where=name,
                repair=repair,
            )
