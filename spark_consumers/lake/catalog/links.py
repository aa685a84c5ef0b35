"""The names of tables in the lake's folder: `orders` is a link to `orders%t3-9f0c2a7b11de`, the table's newest copy.

Each copy has its own folder, whose name is never used again (`takeover.folder_of`). Whoever opens tables by their
folder, as Spark's catalog does, finds the newest copy by the link. A link is relative, so it is right under every name
of the lake's folder (`manifest.home`), and it is replaced by a rename, so the name is always there.

In a table's name, `%` is written `%25`; so no name is that of another table's folder.

A table that was renamed in place keeps its folder. The link then leads to a folder of another name, maybe in another schema, and is
written `../public/orders%t3-9f0c2a7b11de`, by which it is recognized as ours.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from spark_consumers.lake.manifest.takeover import name_of
from spark_consumers.lake.store.place import ObjectPlace, Place
from walsender_bridge.postgres.protocol.relation_name import split_relation

#: Below it: streams, schemas, tables.
_TABLES, _DEPTH = "tables", 3


def folders(root: Place) -> Iterator[Place]:
    """What is in the place of a table's folder, each once: links, which are second names, are left out."""
    if isinstance(root, ObjectPlace):
        found = [root / _TABLES]
        for _ in range(_DEPTH):
            found = [below for folder in found for below in folder.iterdir()]
        return iter(found)
    return (Path(entry.path) for entry in _entries(root) if not entry.is_symlink())


def _entries(root: Path) -> list["os.DirEntry[str]"]:
    """What is in the place of tables. A folder's entry says what it is: no look at each of many tables is needed."""
    found: list[os.DirEntry[str]] = []
    folders = [str(root / _TABLES)]
    for depth in range(_DEPTH):
        found = []
        for folder in folders:
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                found += list(entries)
        folders = [entry.path for entry in found if entry.is_dir()] if depth < _DEPTH - 1 else []
    return found


def link_of(stream: str, schema: str, table: str) -> str:
    """The link of a table, below the lake: what its folders are called, but for what no other copy has."""
    parts = [quote(part, safe=" $~").replace(".", "%2E") for part in (schema, table)]
    return f"tables/{stream}/{parts[0]}/{parts[1]}"


def links(tables: Mapping[str, str]) -> dict[str, str]:
    """For tables (`stream.schema.table`) in these folders (below the lake) the links, and what each leads to.

    A folder of an early version has the table's name itself.
    """
    found = {}
    for name, path in tables.items():
        if name_of(path) == path:
            continue
        stream, _, relation = name.partition(".")
        link = link_of(stream, *split_relation(relation))
        _, _, schema, folder = path.split("/")
        found[link] = folder if name_of(path) == link else f"../{schema}/{folder}"
    return found


def is_ours(name: str, target: str) -> bool:
    """Whether a driver created a link of this name to this target."""
    above, _, folder = target.rpartition("/")
    if above:
        is_beside = above.startswith("../") and above.count("/") == 1
        return is_beside and name_of(folder) != folder
    return name_of(target) == name != target


@dataclass(frozen=True, slots=True)
class Followed:
    """The names for which there is no link: `taken` by something else, which stays; `failed`, with the error."""

    taken: list[str]
    failed: dict[str, OSError]


def follow(root: Path, tables: Mapping[str, str]) -> Followed:
    """Make the links those of these tables, by their folders. A link that fails does not keep the others from being made.

    Raises `OSError` if the folders of tables cannot be listed. The caller ensures that no other driver writes the links.
    """
    wanted = links(tables)
    there = dict(_found(root))
    followed = Followed([], {})
    for name in there.keys() - wanted.keys():
        try:
            (root / name).unlink(missing_ok=True)
        except OSError as error:
            followed.failed[name] = error
    for name, target in _different(there, wanted).items():
        try:
            if name not in there and os.path.lexists(root / name):
                followed.taken.append(name)
                continue
            _replace(root, name, target)
        except OSError as error:
            followed.failed[name] = error
    return followed


def _replace(root: Path, name: str, target: str) -> None:
    draft = root / "_tuskline" / "link.draft"
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    draft.rename(root / name)


def _found(root: Path) -> Iterator[tuple[str, str]]:
    beginning = len(f"{root}/")
    for entry in _entries(root):
        if entry.is_symlink() and is_ours(entry.name, target := str(Path(entry.path).readlink())):
            yield entry.path[beginning:], target


def _different(there: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    return {name: target for name, target in wanted.items() if there.get(name) != target}
