"""A driver of the lake as a generator that stops before each effect: takeover, copies, epochs, housekeeping.

The takeover, the sweeps and every commit are production's own steps. Around them stands what the pipeline does in this
order: copy a table into a new folder and publish it; write a table's files, commit them, publish; retire links,
expire snapshots, remove folders and files of quarantined rows that no link names any more.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from spark_consumers.lake.format import leaks
from spark_consumers.lake.manifest import takeover
from spark_consumers.lake.manifest.takeover import LeftoverKind
from tests.support.lake.store import Link, Metadata, Store, Table, ViolationError
from walsender_bridge.errors import CorruptError, FencedError

#: How many links are kept by housekeeping.
KEPT = 2


class TroubleError(Exception):
    """Something that passes: a full disk, a Java that has no memory."""


@dataclass
class Driver:
    """One driver's life: `steps` yields before each effect.

    `head`: its newest link once it has taken over. `began`: the term of the lake when it first looked.
    """

    store: Store
    name: str
    #: Tables that it copies, and epochs that it writes, one after the other.
    copies: int = 1
    epochs: int = 1
    head: Link | None = None
    began: int | None = None
    #: Which of the takeover's effects fail, counted over all its attempts, for a reason that passes.
    troubles: frozenset[int] = frozenset()
    #: How many effects the takeover took; its link, and tables that turned out to be damaged.
    effects: int = 0
    taking: Link | None = None
    damaged: frozenset[str] = frozenset()
    #: Tables that it is to take before it changes them. `joins`: in the same commit, which is wrong.
    untaken: dict[str, takeover.TakeTable] = field(default_factory=dict)
    joins: ClassVar[bool] = False

    def steps(self):
        """The driver's life, an effect at a time; raises `FencedError` when it is over before its end."""
        while True:
            try:
                taken = yield from self._run(takeover.take_over(self._propose, self.taking))
                break
            except TroubleError:
                yield "try again"
        self.head, self.damaged = taken.head, frozenset(taken.damaged)
        yield from self._run(takeover.sweep(self.head))
        for _ in range(self.copies):
            yield from self._copy()
        for _ in range(self.epochs):
            yield from self._epoch()
        yield from self._sweep_tables()
        yield from self._housekeeping()

    def _propose(self, before: Link | None, term: int) -> Link:
        if self.began is None:
            self.began = before.term if before is not None else 0
        if before is None:
            return Link(1, 0, term)
        return before.next(term=term)

    def _run(self, steps, path: str = ""):
        """Production's steps: a pause before each effect."""
        try:
            effect, past = next(steps), takeover.Past()
            while True:
                takeover.check_invariants(effect, past)
                yield f"{type(effect).__name__} {path}".strip()
                if self.head is None:
                    self.effects += 1
                    if self.effects in self.troubles:
                        raise TroubleError
                if isinstance(effect, takeover.TakeTable):
                    answer = yield from self._take_table(effect)
                elif path and path not in self.store.tables:
                    # A newer driver has removed it. The round fails, and the look at the head says why.
                    raise FencedError("the table is gone")
                else:
                    answer = self.store.do(effect, path)
                if isinstance(effect, takeover.Publish) and answer is None:
                    self.taking = effect.link
                past = past.after(effect, answer)
                effect = steps.send(answer)
        except StopIteration as end:
            return end.value

    def _take_table(self, taken: takeover.TakeTable):
        assert self.taking is not None
        self.untaken.pop(taken.path, None)
        if taken.later and self._is_in_order(taken):
            self.untaken[taken.path] = taken
            return None
        if any(t.path == taken.path and t.has_left for t in self.taking.versions):
            raise ViolationError(f"{self.name} opens {taken.path}, which has left")

        def change(base: Metadata) -> Metadata:
            if any(term > taken.term for term in base.branches):
                raise takeover.overtaken(max(base.branches))
            if taken.snapshot not in base.snapshots:
                raise AssertionError(f"{self.name}: {taken.path} has no snapshot {taken.snapshot}")
            return replace(base, branches=frozenset({taken.term}))

        try:
            yield from self._run(takeover.commit(change, taken.path, clean=True), taken.path)
        except CorruptError as error:
            return error
        return None

    def _is_in_order(self, taken: takeover.TakeTable) -> bool:
        """As `LoadedTables.shows`."""
        metadata = self.store.tables.get(taken.path)
        if metadata is None or taken.path in self.store.damaged:
            return False
        if any(term > taken.term for term in metadata.branches):
            raise takeover.overtaken(max(metadata.branches))
        return taken.snapshot in metadata.snapshots

    def _change(self, change, path: str):
        """Commit to a table that is this driver's, or becomes that."""
        if path in self.untaken and not self.joins:
            yield from self._take_table(replace(self.untaken[path], later=False))
        yield from self._run(takeover.commit(change, path), path)

    def _sweep_tables(self):
        assert self.head is not None
        for path, term in [(table.path, self.head.term) for table in self.head.written]:
            if path in self.damaged:
                continue
            yield f"list what may be left in {path}"
            listed = frozenset(
                file
                for file in self.store.files.get(path, ())
                if leaks.may_be_left(file.partition("/")[0], file.partition("/")[2], term)
            )
            if path in self.untaken:
                yield from self._take_table(replace(self.untaken[path], later=False))
            ours = lambda found, term=term: term in found.branches  # noqa: E731
            yield from self._run(leaks.sweep(listed, ours, path), path)

    # -- what the pipeline does ---------------------------------------------------------------------

    def _publish(self, **changes):
        assert self.head is not None
        link = self.head.next(**changes)
        yield f"publish {link.link}"
        if self.store.create_link(link, self.head) is not None:
            raise FencedError("cannot publish link")
        self.head = link

    def _copy(self):
        assert self.head is not None
        name = f"t{len(self.head.tables)}"
        yield f"create the folder of {name}"
        path = takeover.folder_of(f"tables/s/p/{name}", self.head.term, f"{self.store.draw():x}")
        if not self.store.create_table(path):
            raise FencedError("another writer has created this table")
        snapshot = yield from self._write(path, None, f"copy-t{self.head.term}-0")
        table = Table(path, snapshot, self._quarantined, self._runs)
        yield from self._publish(tables={**self.head.tables, name: table})

    def _epoch(self):
        assert self.head is not None
        link = self.head.link + 1
        tables = {}
        stage = f"{link:020d}-t{self.head.term}-a1"
        yield f"stage {link}"
        self.store.staging.add(stage)
        for name, table in self.head.tables.items():
            if table.has_left or table.path in self.damaged:
                tables[name] = table
                continue
            snapshot = yield from self._write(table.path, table.snapshot_id, stage)
            # The newest run was merged with the oldest one, or is a second one.
            runs = (*table.index_files, *self._runs)[-(1 + link % 2) :]
            tables[name] = Table(table.path, snapshot, self._quarantined, runs)
        yield from self._publish(tables=tables, epoch=self.head.epoch + 1)
        yield "unstage"
        self.store.staging.discard(stage)

    def _write(self, path: str, base: int | None, stage: str):
        """Write files and commit them to our branch; the snapshot."""
        assert self.head is not None
        term, snapshot = self.head.term, self.store.draw()
        files = {f"data/{stage}.parquet"}
        self._quarantined: tuple[str, ...] = (f"quarantine/{stage}-rows.parquet",)
        self._runs: tuple[str, ...] = (f"index/{stage}.run",)
        yield f"write data of {path}"
        self.store.write(path, [*files, *self._quarantined, *self._runs])
        prepared = {f"metadata/{snapshot}-m0.avro", f"metadata/snap-{snapshot}.avro"}

        def change(found: Metadata) -> Metadata:
            joins = self.joins and path in self.untaken and max(found.branches, default=0) <= term
            if term not in found.branches and (base is not None or found.branches) and not joins:
                raise takeover.overtaken(max(found.branches, default=0))
            inherited = found.snapshots.get(base, frozenset()) if base is not None else frozenset()
            made = {**found.snapshots, snapshot: inherited | files | prepared}
            # Iceberg writes its files while the next metadata is built.
            self.store.files.setdefault(path, set()).update(prepared)
            return replace(found, branches=frozenset({term}), snapshots=made)

        yield from self._change(change, path)
        return snapshot

    def _housekeeping(self):
        assert self.head is not None
        yield "retire"
        self.store.retire(KEPT)
        yield "read what is kept"
        links = [self.store.links[number] for number in sorted(self.store.links)]
        for table in self.head.versions:
            kept = {t.snapshot_id for link in links for t in link.versions if t.path == table.path}
            yield from self._expire(table.path, kept)
        yield "list files of quarantined rows and of the index"
        found = [
            left
            for left in self.store.left()
            if left.kind in {LeftoverKind.QUARANTINE, LeftoverKind.INDEX}
        ]
        named = takeover.names_of(links, self.head)
        for left in found:
            if takeover.is_garbage(left, self.head, named, below=self.head.term + 1):
                yield f"remove {left.path}"
                self.store.remove(left)

    def _expire(self, path: str, kept: set[int]):
        assert self.head is not None
        term = self.head.term
        doomed: set[str] = set()

        def change(found: Metadata) -> Metadata | None:
            if max(found.branches, default=0) > term:
                raise takeover.overtaken(max(found.branches))
            left = {s: files for s, files in found.snapshots.items() if s in kept}
            if left == found.snapshots:
                return None
            doomed.clear()
            doomed.update(*found.snapshots.values())
            doomed.difference_update(*left.values())
            return replace(found, snapshots=left)

        try:
            yield from self._change(change, path)
        except CorruptError:
            return
        for file in sorted(doomed):
            yield f"remove {file}"
            self.store.files.get(path, set()).discard(file)
