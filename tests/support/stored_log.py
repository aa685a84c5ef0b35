"""Data directories of log servers with content of a test's choice, and changes to their files that no program would make."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb

from tests.support.log_entries import SCHEMAS, EntryMaker
from walsender_bridge.change_log.protocol import CommitContext, IssuedCommit
from walsender_bridge.change_log.replica import identity
from walsender_bridge.change_log.replica.disk import IndexRow
from walsender_bridge.change_log.replica.host import HostedReplica
from walsender_bridge.change_log.storage.records import (
    key_of,
    pack_row,
    pack_state,
    unpack_row,
    unpack_state,
)

STREAM = "shop"
DATABASES = (b"meta", b"entries", b"index", b"schemas", b"relations")


def make(
    data_dir: Path,
    *,
    commits: int = 6,
    make: EntryMaker | None = None,
    segment_bytes: int = 256 << 20,
    stream: str = STREAM,
    first_global: int = 1,
    trim: int = 0,
    log_id: str = "log",
) -> Path:
    """A stopped log server's data directory: version `n` has the entries 2n-1 and 2n. `trim`: so many versions."""
    if not (data_dir / identity.NAME).exists():
        data_dir.mkdir(parents=True, exist_ok=True)
        identity.make(data_dir)
    maker = make or EntryMaker()
    replica = HostedReplica(data_dir / "streams" / stream, segment_bytes=segment_bytes)
    replica.create(stream, log_id)
    session, _ = replica.open_writer(1)
    for version in range(1, commits + 1):
        local = 2 * version - 1
        entries = [maker.whole(size=400), maker.whole(rows=2)]
        replica.append(session, entries, list(SCHEMAS.values()), None, 2**64 - 1)
        context = CommitContext(version, local, first_global + local - 1, 2)
        replica.commit([IssuedCommit(context)], version)
    if trim:
        replica.trim(2 * trim + 1, 2**62)
    replica.close()
    return data_dir


class Files:
    """The newest segment of a replica, in one write transaction."""

    def __init__(self, transaction: Any, databases: dict[bytes, Any]) -> None:
        self._transaction = transaction
        self._databases = databases

    def entry(self, offset: int) -> bytes:
        return bytes(self._transaction.get(key_of(offset), db=self._databases[b"entries"]))

    def put_entry(self, offset: int, data: bytes | None) -> None:
        """None removes it."""
        self._put(b"entries", key_of(offset), data)

    def row(self, end: int) -> IndexRow:
        """The commit that ends there."""
        return unpack_row(self._transaction.get(key_of(end), db=self._databases[b"index"]), "")

    def put_row(self, end: int, row: IndexRow | None) -> None:
        self._put(b"index", key_of(end), None if row is None else pack_row(row))

    def change_row(self, end: int, *, size: int | None = None, **context: int) -> None:
        row = self.row(end)
        changed = replace(row, context=replace(row.context, **context))
        self.put_row(end, changed if size is None else replace(changed, size=size))

    def change_state(self, **changes: Any) -> None:
        state = self._transaction.get(b"state", db=self._databases[b"meta"])
        durable = replace(unpack_state(bytes(state), Path()), **changes)
        self._put(b"meta", b"state", pack_state(durable))

    def change_context(self, **changes: int) -> None:
        state = self._transaction.get(b"state", db=self._databases[b"meta"])
        context = unpack_state(bytes(state), Path()).context
        assert context is not None
        self.change_state(context=replace(context, **changes))

    def chain(self) -> list[int]:
        found: list[int] = json.loads(self._transaction.get(b"chain", db=self._databases[b"meta"]))
        return found

    def _put(self, name: bytes, key: bytes, value: bytes | None) -> None:
        if value is None:
            assert self._transaction.delete(key, db=self._databases[name])
        else:
            self._transaction.put(key, value, db=self._databases[name])


def change(data_dir: Path, event: Callable[[Files], None], stream: str = STREAM) -> None:
    """Change what the newest segment holds."""
    newest = max((data_dir / "streams" / stream).glob("segment-*"))
    with lmdb.open(str(newest), max_dbs=len(DATABASES)) as env:
        databases = {name: env.open_db(name) for name in DATABASES}
        with env.begin(write=True) as transaction:
            event(Files(transaction, databases))
