"""The seam between a lake's files and where they are: a `Place` is a file or folder of this machine, or of a bucket.

`place` makes one of a location, as metadata and manifests have it. A place in a bucket (`ObjectPlace`) has those members of
`pathlib.Path` that the lake uses, so what reads, writes, lists and removes a table's files is the same code for both. What differs:

- An object is whole or not there, and durable once it is there: there are no drafts, nothing to sync, no folders to make. A
  folder is what names have in common, and a listing of one that does not exist is empty.
- The store keeps checksums of its objects and compares them, so none are beside them (`format.checksums`).
- `create` has one winner, whatever becomes of the answers (`create`); the content must be unique to its writer, or be
  the same whoever writes it.

How a bucket is reached is known for each process, by the beginning of a location (`reach`), since tasks get locations as
strings: the driver hands its knowledge to them (`carried`). Keys are never part of it.
"""

import io
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, TypeVar

from spark_consumers.lake.store.exclusive import create_exclusively
from spark_consumers.lake.store.lake_store import FROM_ENVIRONMENT, Created, StoreOptions

if TYPE_CHECKING:
    from spark_consumers.lake.store.object_store import ObjectStore

_SCHEME = "s3://"
#: Bytes up to which an object that is written stays in memory, and is sent with the patience of a small one.
_SMALL = 8 << 20
#: Seconds until the answer to a large object is given up, and for which the outcome is looked for.
_ANSWER, _OUTCOME = 300.0, 330.0
#: Bytes that a reader asks for at least.
_READ_AHEAD = 1 << 20

#: How buckets are reached, by the beginning of their locations; and the clients of these.
_reached: dict[str, StoreOptions] = {}
_stores: dict[tuple[str, bool], "ObjectStore"] = {}


@dataclass(frozen=True, slots=True)
class Stat:
    """What a listing tells of an object: its bytes, and when it was written, in nanoseconds (the store's clock, whole seconds)."""

    st_size: int
    st_mtime_ns: int


class ObjectPlace:
    """The object at an `s3://` location, or those whose names begin with it. Errors are those of `ObjectStore`."""

    __slots__ = ("_location", "_stat")

    def __init__(self, location: str, stat: Stat | None = None) -> None:
        self._location = location.rstrip("/")
        self._stat = stat

    def __str__(self) -> str:
        return self._location

    def __repr__(self) -> str:
        return f"ObjectPlace({self._location!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPlace) and self._location == other._location

    def __hash__(self) -> int:
        return hash(self._location)

    def __lt__(self, other: "ObjectPlace") -> bool:
        return self._location < other._location

    def __truediv__(self, name: str) -> "ObjectPlace":
        # As with paths: a whole location stands for itself.
        return ObjectPlace(name if name.startswith(_SCHEME) else f"{self._location}/{name}")

    def joinpath(self, *names: str) -> "ObjectPlace":
        """The place of that name below this one."""
        return ObjectPlace("/".join((self._location, *names)))

    @property
    def name(self) -> str:
        """The last part of the location."""
        return self._location.rpartition("/")[2]

    @property
    def parent(self) -> "ObjectPlace":
        """The folder that this is in."""
        return ObjectPlace(self._location.rpartition("/")[0])

    def with_name(self, name: str) -> "ObjectPlace":
        """Another name in the same folder."""
        return self.parent / name

    def relative_to(self, folder: "Place") -> str:
        """The name below this folder. Raises `ValueError` for a place that is not below it."""
        if not self.is_relative_to(folder):
            raise ValueError(f"{self} is not below {folder}")
        return self._location[len(str(folder)) + 1 :]

    def is_relative_to(self, folder: "Place") -> bool:
        """Whether this is that folder, or below it."""
        return f"{self._location}/".startswith(f"{folder}/")

    def resolve(self) -> "ObjectPlace":
        """Itself: an object has one name."""
        return self

    def exists(self) -> bool:
        """Whether there is such an object."""
        store, name = self._at()
        return store.exists(name)

    def is_dir(self) -> bool:
        """Whether any object is below it."""
        store, name = self._at()
        return store.has_any(name)

    def is_symlink(self) -> bool:
        """Never: an object has one name."""
        return False

    def stat(self) -> Stat:
        """Its size and time: of the listing that it was found by, or asked for."""
        if self._stat is None:
            store, name = self._at()
            self._stat = Stat(*store.described(name))
        return self._stat

    def read_bytes(self) -> bytes:
        """The content."""
        store, name = self._at()
        return store.read(name)

    def read_text(self, errors: str = "strict") -> str:
        """The content as text."""
        return self.read_bytes().decode(errors=errors)

    def read_range(self, offset: int, length: int) -> bytes:
        """These bytes of it; fewer at its end."""
        store, name = self._at()
        return store.read_range(name, offset, length)

    def open(self, mode: str = "rb") -> BinaryIO:
        """The object as a file to read from, anywhere."""
        if mode != "rb":
            raise ValueError("an object is written as a whole")
        return io.BufferedReader(_ObjectReader(self), _READ_AHEAD)

    def iterdir(self) -> Iterator["ObjectPlace"]:
        """The objects and folders in this folder, as they are when the iteration begins; none if it does not exist."""
        store, folder = self._at()
        objects, folders = store.listed(folder)
        yield from (
            ObjectPlace(f"{self}/{name}", Stat(size, time_ns)) for name, size, time_ns in objects
        )
        yield from (self / name for name in folders)

    def since(self, name: str) -> Iterator["ObjectPlace"]:
        """The objects in this folder behind that name, in which no object begins."""
        store, folder = self._at()
        for found, size, time_ns in store.listed_since(folder, name):
            yield ObjectPlace(f"{self}/{found}", Stat(size, time_ns))

    def glob(self, pattern: str) -> Iterator["ObjectPlace"]:
        """What is below it by a pattern whose last part only has wildcards."""
        *above, last = pattern.split("/")
        folder = self.joinpath(*above) if above else self
        return (place for place in folder.iterdir() if fnmatchcase(place.name, last))

    def unlink(self, *, missing_ok: bool = False) -> None:  # noqa: ARG002  # a removal of nothing succeeds
        """Remove the object."""
        store, name = self._at()
        store.remove(name)

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: a name is enough."""

    def create(self, content: "bytes | memoryview") -> bool:
        """Create the object, or find that there is one with another content (False). Raises `UnavailableError` if that is unknown."""
        store, name = self._at(large=len(content) > _SMALL)
        return store.create(name, content) is Created.WON

    def replace_by(self, content: bytes) -> None:
        """Give the object this content."""
        store, name = self._at()
        store.replace(name, content)

    def remove_all(self) -> None:
        """Remove all objects below it."""
        store, name = self._at()
        store.remove_below(name)

    def _at(self, *, large: bool = False) -> tuple["ObjectStore", str]:
        """The store that has it, and its name there."""
        location = self._location
        begins = max(
            (each for each in _reached if f"{location}/".startswith(f"{each}/")),
            key=len,
            default="",
        )
        if not begins:
            # Iceberg's metadata may name a file of another lake.
            begins = "/".join(location.split("/")[:4])
        return _store(begins, large=large), location[len(begins) + 1 :]


#: A file or folder of a lake.
Place = Path | ObjectPlace


def place(location: "str | Place") -> Place:
    """The place that a location means: a path, `file:` and a path, or `s3://bucket/name`.

    A name may have any character: nothing in a location is encoded.
    """
    if not isinstance(location, str):
        return location
    if location.startswith(_SCHEME):
        return ObjectPlace(location)
    if not location.startswith("file:"):
        return Path(location)
    path = location.removeprefix("file:")
    return Path("/", path[2:].partition("/")[2]) if path.startswith("//") else Path(path)


def location_of(at: Place) -> str:
    """The place as a URI, as catalogs name it. Nothing is encoded: Iceberg's libraries decode nothing."""
    return str(at) if isinstance(at, ObjectPlace) else f"file://{at}"


def is_object(location: "str | Place") -> bool:
    """Whether this is the location of an object."""
    return isinstance(location, ObjectPlace) or str(location).startswith(_SCHEME)


def below(at: Place, folder: Place) -> str:
    """The name of this place below a folder that it is in."""
    return (
        at.relative_to(folder)
        if isinstance(at, ObjectPlace)
        else str(at.relative_to(Path(str(folder))))
    )


def files_in(folder: Place, since: str = "") -> list[Place]:
    """What is in the folder and does not have a name before `since`, drafts by the name behind their dot.

    Nothing if the folder does not exist. What is before it costs no request of a bucket, and next to nothing on a disk.
    """
    if isinstance(folder, ObjectPlace):
        return list(folder.since(since) if since else folder.iterdir())
    try:
        with os.scandir(folder) as found:
            names = [each.name for each in found]
    except FileNotFoundError:
        return []
    return [folder / name for name in names if name.removeprefix(".") >= since]


def read_range(at: Place, offset: int, length: int) -> bytes:
    """These bytes of the file; fewer at its end."""
    if isinstance(at, ObjectPlace):
        return at.read_range(offset, length)
    with at.open("rb") as content:
        return os.pread(content.fileno(), length, offset)


def create(at: Place, content: bytes) -> bool:
    """Create the file, whole and durable, or find that it exists (False). The content must be unique to its writer."""
    return at.create(content) if isinstance(at, ObjectPlace) else create_exclusively(at, content)


def remove_tree(at: Place) -> None:
    """Remove all that is below it, as far as it can be."""
    if isinstance(at, ObjectPlace):
        at.remove_all()
    else:
        shutil.rmtree(at, ignore_errors=True)


@contextmanager
def spooled(at: ObjectPlace) -> Iterator[BinaryIO]:
    """A file to write that becomes the object at the end of the block; nothing if that raises.

    Raises `FileExistsError` if there is one with another content.
    """
    folder = (os.environ.get("LOCAL_DIRS") or os.environ.get("SPARK_LOCAL_DIRS") or "").split(",")[
        0
    ]
    with tempfile.SpooledTemporaryFile(
        _SMALL, dir=folder if Path(folder or "-").is_dir() else None
    ) as file:
        yield file  # type: ignore[misc]  # it is one
        if not _created(at, file):
            raise FileExistsError(str(at))


def _created(at: ObjectPlace, file: "tempfile.SpooledTemporaryFile[bytes]") -> bool:
    size = file.tell()
    if size <= _SMALL:
        file.seek(0)
        return at.create(file.read())
    file.flush()
    # Not closed here: the client lets go of it in its own time, and then it goes with its last reference.
    return at.create(memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)))


class _ObjectReader(io.RawIOBase):
    """Reads an object by requests of ranges."""

    def __init__(self, at: ObjectPlace) -> None:
        super().__init__()
        self._place = at
        self._size = at.stat().st_size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(begin + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._size - self._at)
        if length <= 0:
            return 0
        found = self._place.read_range(self._at, length)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


# -- how buckets are reached ------------------------------------------------------------------------


def reach(beginning: str, options: StoreOptions) -> None:
    """Locations that begin with this one are reached so, from now on, in this process."""
    beginning = beginning.rstrip("/")
    if _reached.get(beginning) != options:
        _reached[beginning] = options
        for large in (False, True):
            _stores.pop((beginning, large), None)


def options_of(location: "str | Place") -> StoreOptions:
    """How this location is reached."""
    found = [each for each in _reached if f"{location}/".startswith(f"{each}/")]
    return _reached[max(found, key=len)] if found else FROM_ENVIRONMENT


def _store(beginning: str, *, large: bool) -> "ObjectStore":
    found = _stores.get((beginning, large))
    if found is None:
        # Not imported where lakes are in folders.
        from spark_consumers.lake.store.object_store import ObjectStore

        patience = {"answer": _ANSWER, "outcome": _OUTCOME} if large else {}
        options = _reached.get(beginning, FROM_ENVIRONMENT)
        found = _stores[beginning, large] = ObjectStore.at(beginning, options, **patience)
    return found


_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True)
class _Carried(Generic[_In, _Out]):
    """A function for executors, with what the driver knows of buckets."""

    function: Callable[[_In], _Out]
    reached: tuple[tuple[str, StoreOptions], ...]

    def __call__(self, argument: _In) -> _Out:
        for beginning, options in self.reached:
            reach(beginning, options)
        return self.function(argument)


def carried(function: Callable[[_In], _Out]) -> Callable[[_In], _Out]:
    """The function as a task calls it, which then reaches buckets as this process does."""
    return _Carried(function, tuple(_reached.items())) if _reached else function
