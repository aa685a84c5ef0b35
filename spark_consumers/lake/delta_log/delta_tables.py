"""Writes the Delta logs of one writer's tables, behind its links: one commit for each link with another snapshot of a table.

Epochs do not depend on them: a failure here is logged, and retried. What was not written before a crash is written after the next
takeover, from the chain (`actions` has the argument). A copy that was replaced by another one gets what it lacks as well, for its
epochs can be read until they expire. A log that was removed is noticed by its newest commit, of which a few are looked for at a time.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

from spark_consumers.lake.concurrently import each
from spark_consumers.lake.delta_log.actions import (
    LogState,
    Shown,
    is_behind,
    new_vectors,
    next_commit,
)
from spark_consumers.lake.delta_log.inline_vectors import descriptor
from spark_consumers.lake.delta_log.log import REFUSAL, DeltaLog, cleaning, refusal_record
from spark_consumers.lake.delta_log.record import Behind, DeltaRecord, write_record
from spark_consumers.lake.delta_log.schema import DeltaSchema, delta_schema, refusal
from spark_consumers.lake.delta_log.snapshot import ReadManifests
from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.position_deletes import read_removed
from spark_consumers.lake.format.puffin import encode
from spark_consumers.lake.format.table_format import SnapshotRecord, TableFormat
from spark_consumers.lake.manifest.chain import Chain, Manifest
from walsender_bridge.errors import NotSupportedError
from walsender_bridge.runtime import fail_point, logs

#: Commits from one checkpoint to the next: what a reader reads behind a checkpoint, at most.
CHECKPOINT_EVERY: Final = 50
#: Commits that are removed at once, at least, since each time may cost a checkpoint.
_CLEAN_AT_LEAST: Final = 10
#: Links that a new log begins with, at most: before Delta was enabled, or of a driver that was killed before its first commit.
_FIRST: Final = 16
#: Seconds between two looks for logs that were removed, and the tables that are looked at each time: in a bucket, each is a request.
_LOOK_EVERY: Final = 10.0
_LOOK_AT: Final = 16
#: Tables whose state is kept in memory.
_STATES: Final = 256
#: Seconds until a table that could not be written is tried again.
_AFTER_FAILURE: Final = 5.0

log = logs.logger()


class DeltaTables:
    """The Delta logs of the tables that one writer publishes. `is_delta`: whether a table is to have one, by its name in `setting_names`."""

    def __init__(
        self,
        chain: Chain,
        tables: TableFormat,
        is_delta: Callable[[str | None], bool] = lambda _: True,
    ) -> None:
        self._chain = chain
        self._root, self._store = chain.root, chain.store
        self._format = tables
        self._is_delta = is_delta
        #: By the table's path: what its log does not show yet, as far as is known; the oldest first.
        self._pending: dict[str, list[Shown]] = {}
        #: By the table's path: the first link that is known with the snapshot of the newest one, and the table's name.
        self._newest: dict[str, tuple[Shown, str]] = {}
        self._states: dict[str, LogState] = {}
        #: By the table's path: the manifests of its last snapshot here, of tables that have a state.
        self._manifests: dict[str, ReadManifests] = {}
        #: The same, its last schema here.
        self._schemas: dict[str, tuple[SnapshotRecord, DeltaSchema]] = {}
        #: By the table's path: what the commits of its log show, by their versions.
        self._shown: dict[str, dict[int, Shown]] = {}
        #: By the table's path: why it has no Delta log.
        self.refused: dict[str, str] = {}
        self._retry_at: dict[str, float] = {}
        #: By the table's path: the newest version of its log, with the epoch that it shows, those first that were not looked at for
        #: longest; and why the last attempt to write it failed.
        self._at: dict[str, tuple[int, int]] = {}
        self._failed: dict[str, str] = {}
        self._look_at = time.monotonic() + _LOOK_EVERY
        self._recorded: DeltaRecord | None = None
        #: The order of the newest link that this writer knows.
        self._known = 0, 0
        for manifest in chain.links():
            self.remember(manifest)
            head = Shown(manifest.link, manifest.epoch, 0, manifest.term)
        # A log may show a link that was given up since. The newest one's term is higher, though the table's snapshot is an older link's.
        for path, (shown, _) in self._newest.items():
            pending = self._pending[path]
            if pending[-1].term < head.term:
                pending.append(replace(head, snapshot=shown.snapshot))

    def remember(self, manifest: Manifest) -> None:
        """This link was published: its tables' logs are to show it."""
        self._known = manifest.term, manifest.link
        called = setting_names(manifest)
        readable = {
            name: table for name, table in manifest.readable.items() if self._is_delta(called[name])
        }
        for name, table in readable.items():
            known = self._newest.get(table.path)
            if known is not None and known[0].snapshot == table.snapshot_id:
                self._newest[table.path] = known[0], name
                continue
            shown = _shown_by(manifest, table.snapshot_id)
            self._pending.setdefault(table.path, []).append(shown)
            self._newest[table.path] = shown, name
        for path in self._newest.keys() - {table.path for table in readable.values()}:
            del self._newest[path]
            if path not in self._pending:
                self._forget(path)

    def _forget(self, path: str) -> None:
        """An earlier copy has all that it is to have."""
        self._forget_read(path)
        for kept in (
            *(self._pending, self._shown, self.refused),
            *(self._at, self._failed, self._retry_at),
        ):
            kept.pop(path, None)

    def _forget_read(self, path: str) -> None:
        """The next commit to this table's log is to read all of the table."""
        for kept in (self._states, self._manifests, self._schemas):
            kept.pop(path, None)

    def _called(self, path: str) -> str:
        """The table's name; of an earlier copy, its path."""
        return self._newest[path][1] if path in self._newest else path

    def show(self) -> None:
        """Write what the logs do not show yet, and record which of them are behind, if these are others."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY
            try:
                self._look()
            except Exception as error:
                log.warning("no look for removed Delta logs", error=str(error)[:500])
        due = [path for path in self._pending if self._retry_at.get(path, now) <= now]
        if due:
            each(((path, self._pending[path]) for path in due), self._show_table)
        record = self._record()
        if record != self._recorded and write_record(self._store, record):
            self._recorded = record

    def _look(self) -> None:
        """Have logs that were removed written again: a few tables are looked at each time, in turn."""
        turn = [path for path in self._at if path not in self._pending][:_LOOK_AT]
        for path in turn:
            self._at[path] = self._at.pop(path)

        def is_there(path: str, at: tuple[int, int]) -> bool:
            return DeltaLog(self._root / path).commit_file(at[0]).exists()

        found = each(((path, self._at[path]) for path in turn), is_there)
        removed = [path for path, there in zip(turn, found, strict=True) if not there]
        if removed:
            self._begin_again(removed)

    def _begin_again(self, paths: Collection[str]) -> None:
        """These tables' logs are to show the newest links, as those of a takeover; if a later writer's are there, they stay as they are."""
        shown: dict[str, dict[int, Shown]] = {path: {} for path in paths}
        for manifest in reversed(self._chain.newest(_FIRST)):
            for table in manifest.readable.values():
                if table.path in shown:
                    first = _shown_by(manifest, table.snapshot_id)
                    shown[table.path].setdefault(table.snapshot_id, first)
        for path, found in shown.items():
            newest, name = self._newest[path]
            log.warning("Delta log of table was removed, and is written again", table=name)
            # The link that made it is older than these, if the table has not changed since.
            found[newest.snapshot] = newest
            self._forget(path)
            self._pending[path] = list(found.values())

    def _record(self) -> DeltaRecord:
        behind = {
            name: Behind(self._at[path][1] if path in self._at else None, newest.epoch, reason)
            for path, (newest, name) in self._newest.items()
            if (reason := self.refused.get(path) or self._failed.get(path))
        }
        return DeltaRecord(len(self._newest), behind)

    def _show_table(self, path: str, pending: list[Shown]) -> None:
        try:
            self._write_all(path, pending)
        except Exception as error:
            self._failed[path] = str(error)[:500]
            log.warning(
                "Delta log of table is out of date",
                table=self._called(path),
                error=str(error)[:500],
            )
            self._forget_read(path)
            self._retry_at[path] = time.monotonic() + _AFTER_FAILURE
        else:
            del self._pending[path]
            self._retry_at.pop(path, None)
            self._failed.pop(path, None)
            if path not in self._newest:
                self._forget(path)

    def _write_all(self, path: str, pending: list[Shown]) -> None:
        delta = DeltaLog(self._root / path)
        state = self._states.pop(path, None) or delta.state()
        if state.version < 0:
            del pending[:-_FIRST]
        while pending:
            if is_behind(state, pending[0]):
                try:
                    state = self._write(path, delta, state, pending[0])
                except NotSupportedError as error:
                    self._refuse(path, pending[0], error.what)
                    del pending[0]
                    continue
                if self.refused.pop(path, None) is not None:
                    # Else it would be the reason that readers are told whenever the log is behind.
                    checksums.remove(self._root / path / REFUSAL)
                    log.info("Delta log for table again", table=self._called(path))
            if not is_behind(state, pending[0]):
                del pending[0]
        self._states[path] = state
        if state.version >= 0:
            self._at[path] = state.version, state.shown.epoch
        while len(self._states) > _STATES:
            self._forget_read(next(iter(self._states)))

    def _refuse(self, path: str, shown: Shown, reason: str) -> None:
        """Leave this snapshot out of the log, and tell why. The next one may be another."""
        if self.refused.get(path) != reason:
            log.warning("no Delta log for table", table=self._called(path), reason=reason)
        self.refused[path] = reason
        self._store.replace(
            f"{path}/{REFUSAL}", refusal_record(shown.snapshot, reason), durable=False
        )

    def _write(self, path: str, delta: DeltaLog, state: LogState, shown: Shown) -> LogState:
        """Write the commit that shows this; the state of the log then, which another writer's commit may have made."""
        folder = self._root / path
        last = self._schemas.get(path)
        found = self._format.snapshot_record(str(folder), shown.snapshot, last and last[0])
        if last is None or found.schema is not last[0].schema:
            named = found.has_first_names
            if reason := refusal(found.schema, found.schemas, has_first_names=named):
                raise NotSupportedError(reason, where=path)
            last = self._schemas[path] = found, delta_schema(found.schema, found.schemas)
        schema = last[1]
        manifests = self._manifests.setdefault(path, ReadManifests())
        wanted, vectors = manifests.wanted(found.manifest_list, schema.physical, path)
        encoded = {}
        for file in new_vectors(state, wanted.values()):
            vector = vectors[file.vector]
            removed = read_removed(folder, vector)
            encoded[file.vector] = descriptor(encode(removed), len(removed))
        moment = int(time.time() * 1000)
        actions = next_commit(state, shown, schema, found.uuid, wanted.values(), encoded, moment)
        version = state.version + 1
        fail_point.hit("before-delta-commit")
        if not delta.commit(version, actions):
            # Another writer's, or our own of an attempt that failed behind it.
            return delta.state()
        fail_point.hit("after-delta-commit")
        self._shown.setdefault(path, {})[version] = shown
        state = state.after(version, actions)
        if version and version % CHECKPOINT_EVERY == 0:
            delta.write_checkpoint(state)
        return state

    def clean(self, path: str, kept: Collection[int]) -> None:
        """Remove the versions of a table's log that show none of these snapshots: the others are about to expire.

        Without any, all of an earlier copy is about to be removed.
        """
        if not kept and path not in self._newest:
            self._forget(path)
            return
        pending = self._pending.get(path)
        if pending:
            # What could not be written for so long is gone for Delta.
            pending[:] = [shown for shown in pending if shown.snapshot in kept]
        try:
            self._clean(path, kept)
        except Exception as error:
            log.warning("Delta log of table is not cleaned", path=path, error=str(error)[:500])

    def _clean(self, path: str, kept: Collection[int]) -> None:
        delta = DeltaLog(self._root / path)
        there = delta.listing()
        if len(there.commits) < _CLEAN_AT_LEAST:
            return
        known = self._shown.setdefault(path, {}) if path in self._newest else {}
        for version in there.commits:
            if version not in known:
                known[version] = delta.shown(version)
        # A writer that has been overtaken meanwhile does not know what the later one's epochs need.
        needed = {
            version
            for version in there.commits
            if known[version].snapshot in kept or known[version].order > self._known
        }
        decided = cleaning(there, needed, _CLEAN_AT_LEAST)
        if decided is None:
            return
        for version in decided.new_checkpoints:
            delta.write_checkpoint(delta.state(version))
        delta.remove(decided.commits, decided.checkpoints)
        for version in decided.commits:
            known.pop(version, None)


def setting_names(manifest: Manifest) -> dict[str, str | None]:
    """By the names in the lake: the name by which the configuration says whether this is a Delta table.

    That of a table at its source, and of a view or feed its own. None, for which no section is, if a view or feed has the name that a
    table with another name in the lake has at its source: the section is that table's.
    """
    at_sources = manifest.at_sources
    of_tables = frozenset(at_sources.values())
    return {
        name: at_sources.get(name, None if name in of_tables else name)
        for name in manifest.readable
    }


def _shown_by(manifest: Manifest, snapshot: int) -> Shown:
    return Shown(manifest.link, manifest.epoch, snapshot, manifest.term)
