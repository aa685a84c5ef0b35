"""Data files and partial folds, as the executors write them.

A data file's name begins with its *stage*: the link that it is written for, the writer's term, the attempt.
A manifest names for each table the stage of its last write. So a file is garbage if the manifest of the link
in its name names another stage for its table: that is how what a crash or a failed attempt has left behind
is told from data (`orphans`). Data files are synced before they are handed to a table.

A file has its name only when it is whole (`whole_file`): Spark runs a task again that has failed, perhaps
while an earlier attempt still runs somewhere, and all attempts write the same name. The first whole file keeps it; its
bytes are those of every other attempt. A file of that name with other bytes is another writer's, and an error: what is
known of the rows (how many, whose) is of the file that was to be written.

Each page of a Parquet file has its checksum in the file, which is compared whenever the page is read: here, and by the JVM in a
bucket (`spark.buckets`), whose objects have no checksums beside them.
"""

import errno
import filecmp
import os
import re
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.dictionaries import with_dictionary
from spark_consumers.lake.format.file_names import in_files, in_table
from spark_consumers.lake.format.statistics import with_statistics
from spark_consumers.lake.format.table_format import FileInfo
from spark_consumers.lake.manifest.table_version import TableVersion
from spark_consumers.lake.store.place import (
    ObjectPlace,
    Place,
    files_in,
    is_object,
    place,
    spooled,
)
from walsender_bridge.errors import CorruptError, UnavailableError
from walsender_bridge.runtime import logs

_STAGE = re.compile(r"(\d{20})-t(\d+)-a(\d+)")
_ROW_GROUP = 128 * 1024

log = logs.logger()


@dataclass(frozen=True, slots=True)
class Stage:
    """One attempt at one link by one writer."""

    link: int
    term: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.link:020d}-t{self.term}-a{self.attempt}"

    @staticmethod
    def names_from(link: int) -> str:
        """What no name of an attempt at this link, or at a later one, is before."""
        return f"{link:020d}"

    @classmethod
    def of(cls, name: str) -> "Stage | None":
        """The stage that a file's or a folder's name begins with."""
        match = _STAGE.match(name)
        return cls(*(int(part) for part in match.groups())) if match else None


def write_data(path: str, columns: list[pa.Array], schema: pa.Schema) -> FileInfo | None:
    """Write one data file; None, and no file, if there are no rows.

    `schema` is the table's (`TableFormat.file_schema`) or a part of it: small integers are widened to it.
    """
    if not len(columns[0]):
        return None
    return write_table(path, pa.table(widened(columns, schema), schema=schema))


def widened(columns: list[pa.Array], schema: pa.Schema) -> list[pa.Array]:
    """The columns with the types of the schema."""
    return [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(columns, schema, strict=True)
    ]


def numbered(path: str, number: int) -> str:
    """One of the names of several files that are written in the place of this Parquet file."""
    return f"{path.removesuffix('.parquet')}.{number}.parquet"


def write_table(
    path: str, table: pa.Table, *, codec: str = "zstd", level: int | None = None
) -> FileInfo:
    """Write a Parquet file, synced; `codec` and `level` in Arrow's words."""
    with whole_file(path) as file:
        with PartsWriter(file, table.schema, codec, level) as writer:
            writer.write(table)
        size = file.tell()
    return FileInfo(path, table.num_rows, size)


def read_data(path: str | Place, columns: list[str] | None = None) -> pa.Table:
    """Read a Parquet file of the lake, with the names that its columns had in the table when it was written. Raises `CorruptError` if it is not what was written."""
    checksums.check(place(path))
    with as_damage(path), opened(path) as file:
        found = file.read() if columns is None else _columns(file, columns)
    return pa.Table.from_arrays(found.columns, schema=in_table(found.schema))


def _columns(file: pq.ParquetFile, columns: Sequence[str]) -> pa.Table:
    there = dict(zip(in_table(file.schema_arrow).names, file.schema_arrow.names, strict=True))
    wanted = [there[name] for name in columns]
    # Arrow also reads columns whose name begins with one of these and a dot.
    return file.read(wanted).select(wanted)


class PartsWriter:
    """Writes a data file in parts, each at least one row group; `codec` and `level` in Arrow's words.

    The first part shows which columns get dictionaries; floating-point columns get no bounds (`statistics`). Columns get their names in data files (`file_names`).
    """

    def __init__(self, file: BinaryIO, schema: pa.Schema, codec: str, level: int | None) -> None:
        self._file, self._schema, self._codec, self._level = file, in_files(schema), codec, level
        self._writer: pq.ParquetWriter | None = None

    def write(self, part: pa.Table) -> None:
        """Write these rows."""
        named = pa.Table.from_arrays(part.columns, schema=self._schema)
        self._begun(named).write_table(named, row_group_size=_ROW_GROUP)

    def _begun(self, first: pa.Table) -> pq.ParquetWriter:
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self._file,
                self._schema,
                compression=self._codec,
                compression_level=self._level,
                use_dictionary=with_dictionary(first),
                write_statistics=with_statistics(self._schema),
                write_page_checksum=True,
            )
        return self._writer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._begun(self._schema.empty_table())
        if self._writer is not None:
            self._writer.close()


def opened(path: str | Place) -> pq.ParquetFile:
    """A Parquet file of the lake, to be read in parts. Its pages are compared with their checksums (`as_damage`)."""
    return pq.ParquetFile(readable(path), page_checksum_verification=True)


def readable(path: str | Place) -> str | BinaryIO:
    """A file of the lake as Arrow reads it."""
    found = place(path)
    return found.open() if isinstance(found, ObjectPlace) else str(found)


@contextmanager
def as_damage(path: str | Place) -> Iterator[None]:
    """What Arrow says of a file that it cannot read, as `CorruptError`: the file may have no checksums."""
    try:
        with checksums.read_whole(place(path)):
            yield
    except (pa.ArrowInvalid, OSError) as error:
        # Arrow's own have no number; others are the machine's, and pass, but for a disk's.
        if getattr(error, "errno", None) not in {None, errno.EIO}:
            raise
        raise CorruptError(
            f"the file cannot be read: {str(error).partition(chr(10))[0][:200]}",
            where=str(path),
            repair=checksums.REPAIR,
        ) from None


@contextmanager
def whole_file(path: str, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write that gets its name at the end of the block; none if that raises.

    If `durable`, it is synced before, and gets its checksums (`checksums`).

    If another attempt of the same task has made the file meanwhile, that one stays: it may be in use. Raises
    `UnavailableError` if the name is another file's.
    """
    target = place(path)
    if isinstance(target, ObjectPlace):
        with _other_content(path), spooled(target) as spool:
            yield spool
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(draft, "xb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        try:
            os.link(draft, target)
        except FileExistsError:
            with _other_content(path):
                if not filecmp.cmp(draft, target, shallow=False):
                    raise
        if durable:
            checksums.seal(target)
    finally:
        draft.unlink(missing_ok=True)


@dataclass
class NewFile:
    """A file that is written under a name that no other attempt has; removed at the end if it is not wanted after all."""

    file: BinaryIO
    is_wanted: bool = True
    size: int = 0


@contextmanager
def new_file(path: str) -> Iterator[NewFile]:
    """A file to write: durable at the end of the block, with checksums, and its size is known then."""
    target = place(path)
    if isinstance(target, ObjectPlace):
        with suppress(_UnwantedError), spooled(target) as spool:
            new = NewFile(spool)
            yield new
            if not new.is_wanted:
                raise _UnwantedError
            new.size = spool.tell()
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "xb") as file:
        new = NewFile(file)
        yield new
    if not new.is_wanted:
        target.unlink()
        return
    new.size = sync(target)
    checksums.seal(target)


class _UnwantedError(Exception):
    pass


@contextmanager
def _other_content(path: str) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise UnavailableError(
            "another file with this name has other rows, and is left unchanged",
            where=path,
            repair="the job retries by itself, under another name",
        ) from None


def sync(path: Path) -> int:
    """Make a written file durable; its size in bytes."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def write_partial(path: str, table: pa.Table) -> str:
    """Write what another task of the same round reads; not synced, since a round starts over after a crash."""
    return write_partials(path, [table])


def write_partials(path: str, parts: Sequence[pa.Table]) -> str:
    """Write tables with one schema into one file, of which a task may read one alone."""
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with (
        whole_file(path, durable=False) as sink,
        pa.ipc.new_file(sink, parts[0].schema, options=options) as out,
    ):
        for table in parts:
            arrays = [column.combine_chunks() for column in table.columns]
            out.write_batch(pa.record_batch(arrays, schema=table.schema))
    return path


def read_partial(path: str, part: int | None = None) -> pa.Table:
    """What `write_partial` wrote, or one part of what `write_partials` wrote (None: all of them)."""
    with _bytes_of(path, whole=part is None) as source:
        file = pa.ipc.open_file(source)
        if part is None:
            return file.read_all()
        return pa.Table.from_batches([file.get_batch(part)], file.schema)


def _bytes_of(path: str, *, whole: bool) -> Any:
    """A file that another task wrote; `whole`: all of it is read."""
    if not is_object(path):
        return pa.memory_map(path)
    return pa.BufferReader(place(path).read_bytes()) if whole else place(path).open()


def orphans(folder: Place, stages: Mapping[int, str], term: int) -> Iterator[Place]:
    """The data files in a table's folder that are orphaned for a writer of this term.

    `stages`: for some links the stage that the link's manifest names for this table. Files for other links
    are left alone, and so are those of a higher term: where links were lost, a newer writer makes links of these numbers again.
    """
    for file in files_in(folder / "data", Stage.names_from(min(stages, default=0))):
        stage = Stage.of(file.name.removeprefix("."))
        if stage is None or stage.link not in stages or stage.term > term:
            continue
        sealed = checksums.file_of(file)
        if sealed is not None and sealed.exists():
            # These go with their file.
            continue
        # What a task had not finished when it was killed is of no use, whichever stage was published.
        if file.name.startswith(".") or str(stage) != stages[stage.link]:
            yield file


def remove_orphans(
    lake: Place,
    tables: Mapping[str, TableVersion],
    links: Mapping[int, Mapping[str, TableVersion]],
    term: int,
) -> None:
    """Remove data files of rounds that were not published, as a writer of this term.

    `links`: for some links the tables that they name. A table is known by its folder: its name may have been another one's then.
    """
    by_path = {
        link: {table.path: table.stage for table in there.values()} for link, there in links.items()
    }
    for name, table in tables.items():
        stages = {link: there.get(table.path, "") for link, there in by_path.items()}
        for file in list(orphans(lake / table.path, stages, term)):
            log.info("orphan removed", file=file.name, table=name)
            checksums.remove(file)


def remove_attempt(lake: Place, tables: Collection[TableVersion], stage: Stage) -> None:
    """Remove the data files that this attempt, of which nothing is published, has written into these tables.

    Those of other attempts at its link stay: one of them may have made its write, which the next one continues from.
    """
    for table in tables:
        for file in files_in(lake / table.path / "data", Stage.names_from(stage.link)):
            is_own = Stage.of(file.name.removeprefix(".")) == stage
            if is_own and checksums.file_of(file) is None:
                log.info("file of a refused write removed", file=file.name, table=table.path)
                checksums.remove(file)
