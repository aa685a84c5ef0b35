"""What shows that a table's own files in a bucket are what was written: objects have no checksums beside them (`checksums`).

    metadata file       the property `tuskline.commit`: what is drawn for the commit, and the CRC32 of the file, in which these
                        eight digits are zeros
    manifests           the member `tuskline.crc32` of a snapshot's summary: the CRC32 of its manifest list, followed by those of
                        its manifests

The store compares checksums of its own when an object arrives; whether it does later is its own affair. Files of tables in a
REST catalog and of earlier versions have none of these, and are not compared.
"""

import gzip
import json
import re
import struct
import uuid
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic_core import to_json

from spark_consumers.lake.format import avro
from spark_consumers.lake.format.checksums import REPAIR, read_whole
from spark_consumers.lake.store.place import Place, is_object, place
from walsender_bridge.errors import CorruptError

#: The member of a snapshot's summary.
MANIFESTS = "tuskline.crc32"
_COMMIT = "tuskline.commit"
_SEAL = re.compile(rb'"tuskline\.commit": ?"[^"]{32}-([^"]{8})"')
_ZEROS = b"0" * 8
_SUM = struct.Struct(">I")
#: Manifests that are read at the same time, and how many are known at most.
_THREADS, _KNOWN = 8, 100_000


def sealed(metadata: Mapping[str, Any]) -> str:
    """The content of a metadata file, which no other commit has."""
    commit = f"{uuid.uuid4().hex}-{_ZEROS.decode()}"
    properties = {**metadata.get("properties", {}), _COMMIT: commit}
    text = to_json({**metadata, "properties": properties}).decode()
    return text.replace(commit, f"{commit[:-8]}{zlib.crc32(text.encode()):08x}")


def check_metadata(content: bytes, where: str) -> None:
    """Raise `CorruptError` if the content of a metadata file is not what was written."""
    found = _SEAL.search(content)
    if found is None:
        return
    begin, end = found.span(1)
    crc = zlib.crc32(content[end:], zlib.crc32(_ZEROS, zlib.crc32(content[:begin])))
    if found[1] != b"%08x" % crc:
        raise CorruptError("checksum mismatch in the metadata", where=where, repair=REPAIR)


def metadata_in(file: Place, content: bytes) -> dict[str, Any]:
    """What a metadata file of this content says. Raises `CorruptError` for another content than was written."""
    try:
        # Another writer may have compressed it.
        text = gzip.decompress(content) if ".gz." in file.name else content
        if is_object(file):
            check_metadata(text, str(file))
        metadata: dict[str, Any] = json.loads(text)
    except (OSError, EOFError, ValueError) as error:
        raise CorruptError(
            f"the metadata cannot be read: {error}", where=str(file), repair=REPAIR
        ) from None
    return metadata


class Manifests:
    """Sums of snapshots' manifests. What one object has read it does not read again: manifests never change."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def sum(self, manifest_list: Place) -> str:
        """What the summary of the snapshot with this manifest list has to say. Raises `CorruptError`."""
        with read_whole(manifest_list):
            content = manifest_list.read_bytes()
        names = [row["manifest_path"] for row in avro.rows_of(content, str(manifest_list))]
        if len(self._known) > _KNOWN:
            self._known.clear()
        if unknown := [name for name in names if name not in self._known]:
            with ThreadPoolExecutor(min(_THREADS, len(unknown))) as pool:
                self._known.update(zip(unknown, pool.map(_crc, unknown), strict=True))
        sums = b"".join(_SUM.pack(self._known[name]) for name in names)
        return f"{zlib.crc32(sums, zlib.crc32(content)):08x}"

    def check(self, manifest_list: Place, summary: Mapping[str, Any]) -> None:
        """Raise `CorruptError` if the manifests are not those of this summary; one of an earlier version tells nothing."""
        wanted = summary.get(MANIFESTS)
        if wanted is not None and self.sum(manifest_list) != wanted:
            raise CorruptError(
                "checksum mismatch in the manifests of a snapshot",
                where=str(manifest_list),
                repair=REPAIR,
            )


def _crc(manifest: str) -> int:
    file = place(manifest)
    with read_whole(file):
        return zlib.crc32(file.read_bytes())
