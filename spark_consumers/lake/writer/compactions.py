"""Offers of maintainers, as the writer takes them: each becomes part of its table with the next link, or its files go.

In this order: the table's commit, the link, the answer in the offer's record, the removal of the request. A crash before the
link leaves a commit that was not published, and an offer that the next writer refuses, since it has another term. A crash
after it leaves an offer that is part of the table: the next writer refuses it as well, and removes of its files those that
no snapshot needs, which is none.

An offer never stops a round: whatever goes wrong with one, it is refused.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import pyarrow as pa
from pyroaring import BitMap64

from spark_consumers.lake.compaction.decide import Accepted, Refused, decide, with_merged
from spark_consumers.lake.compaction.maintainers import Maintainers
from spark_consumers.lake.compaction.offer import OFFERS, Offer, OfferName
from spark_consumers.lake.compaction.rewrite import current, files_of, liveness_of
from spark_consumers.lake.concurrently import each
from spark_consumers.lake.epoch.arranged import by_position
from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.data_files import Stage
from spark_consumers.lake.format.position_deletes import write_positions
from spark_consumers.lake.format.puffin import write_vectors
from spark_consumers.lake.format.table_format import FileInfo, TableFormat, TableWrite, Vector
from spark_consumers.lake.index.build import Identity, add_files
from spark_consumers.lake.index.liveness import Liveness
from spark_consumers.lake.manifest.chain import Chain, Manifest, TableVersion
from spark_consumers.lake.manifest.sealed_json import dump, parse
from spark_consumers.lake.policy import copies_on_write
from spark_consumers.lake.store.place import place
from spark_consumers.lake.writer.requests import Request
from walsender_bridge.errors import CorruptError, FencedError
from walsender_bridge.runtime import fail_point, logs

#: Offers that are decided at a time, at most: epochs wait meanwhile.
_MOST = 8

log = logs.logger()


@dataclass(frozen=True, slots=True)
class Decided:
    """What became of an offer: the table with it, or why it was refused. `offer`: None if it could not be read."""

    request: Request
    offer: Offer | None
    made: TableVersion | None = None
    reason: str = ""


class Compactions:
    """The offers for one lake, for one writer's term."""

    def __init__(self, chain: Chain, tables: TableFormat, deletes: Mapping[str, str]) -> None:
        self._chain = chain
        self._format = tables
        self._deletes = deletes
        self._maintainers = Maintainers(chain.store)
        #: Offers that this writer has committed to a table, or tried to.
        self._committed: set[str] = set()

    def is_maintained(self) -> bool:
        """Whether a maintainer works on this lake."""
        return bool(self._maintainers.working())

    def decided(self, head: Manifest, asked: Sequence[Request], stage: Stage) -> list[Decided]:
        """Decide on some of these offers, and commit those that are accepted. `stage`: of what is written for them.

        Raises `FencedError`.
        """
        first: dict[str, Request] = {}
        for request in asked:
            # A second one of a table is decided on what the first has made.
            first.setdefault(request.tables[0] if request.tables else request.id, request)
        return each(list(first.items())[:_MOST], lambda _, request: self._one(head, request, stage))

    def head_with(self, head: Manifest, decided: Sequence[Decided]) -> Manifest:
        """The head with the accepted offers."""
        made = {d.offer.table: d.made for d in decided if d.offer is not None and d.made}
        return replace(head, tables={**head.tables, **made}) if made else head

    def settle(self, head: Manifest, decided: Sequence[Decided]) -> None:
        """The accepted offers are in the chain: answer, and remove what is not needed any more. `head` is ours."""
        for one in decided:
            if one.offer is not None and one.made is None:
                log.info("compaction refused", table=one.offer.table, reason=one.reason)
                # An earlier term's may have been accepted then; and ours, if it was published although that has failed.
                known = one.offer.term == head.term and one.offer.name not in self._committed
                self._try_to_remove_files(head, one.offer, named=not known)
            elif one.offer is not None:
                log.info(
                    "compacted",
                    table=one.offer.table,
                    files_before=len(one.offer.old),
                    files_after=len(one.offer.files),
                )
            name = f"{OFFERS}/{one.request.offer}"
            if one.offer is not None:
                self._chain.store.replace(
                    name,
                    dump({"accepted": one.made is not None, "reason": one.reason}),
                    durable=False,
                )
            else:
                self._chain.store.remove(name)

    def sweep(self, head: Manifest, asked: Collection[Request]) -> int:
        """Remove what dead maintainers left that nobody decides on any more; how many offers. `head` is ours.

        Raises `FencedError`.
        """
        store = self._chain.store
        # The records first: a maintainer holds its own before it makes one of an offer.
        names = [name for name in map(OfferName.of, store.names(OFFERS)) if name is not None]
        living = self._maintainers.living()
        waiting = {request.offer for request in asked}
        left = [
            name
            for name in names
            if name.maintainer not in living and name.term <= head.term and str(name) not in waiting
        ]
        for name in left:
            self._discard(head, name)
        return len(left)

    def _discard(self, head: Manifest, name: OfferName) -> None:
        record = f"{OFFERS}/{name}"
        with suppress(FileNotFoundError, CorruptError, KeyError, TypeError, ValueError):
            offer = Offer.from_json(parse(self._chain.store.read(record), record))
            log.info("offer of a dead maintainer removed", table=offer.table, offer=offer.name)
            self._try_to_remove_files(head, offer, named=True)
        self._chain.store.remove(record)

    def _try_to_remove_files(self, head: Manifest, offer: Offer, *, named: bool) -> None:
        """Remove an offer's files, or leave them where that fails: epochs of all tables wait meanwhile. Raises `FencedError`."""
        try:
            self._remove_files(head, offer, named=named)
        except FencedError:
            raise
        except Exception as error:
            log.warning(
                "files of a refused offer are left",
                table=offer.table,
                offer=offer.name,
                error=str(error)[:500],
            )

    def _remove_files(self, head: Manifest, offer: Offer, *, named: bool) -> None:
        """Remove an offer's files; if it is possible that they are `named`, those that no snapshot needs."""
        name = OfferName.of(offer.name)
        assert name is not None
        folder = self._chain.root / offer.path
        files, drafts = files_of(folder, name)
        if named and files:
            self._format.sweep(str(folder), head.term, frozenset(map(str, files)))
            files = []
        needed = {run for table in head.versions for run in table.index_files}
        runs = [folder / name.run] if name.run not in needed else []
        for file in (*drafts, *files, *runs):
            checksums.remove(file)

    def _one(self, head: Manifest, request: Request, stage: Stage) -> Decided:
        offer = None
        try:
            record = f"{OFFERS}/{request.offer}"
            offer = Offer.from_json(parse(self._chain.store.read(record), record))
            return self._decide(head, request, offer, stage)
        except FencedError:
            raise
        except FileNotFoundError as error:
            return Decided(request, offer, reason=f"a file of it is missing: {error.filename}")
        except Exception as error:
            return Decided(request, offer, reason=f"it cannot be used: {error}"[:500])

    def _decide(self, head: Manifest, request: Request, offer: Offer, stage: Stage) -> Decided:
        table, folder = head.tables.get(offer.table), str(self._chain.root / offer.path)
        known = Liveness(folder, ())
        if table is not None and table.path == offer.path and table.runs is not None:
            known = liveness_of(folder, table)
        no_vectors = copies_on_write(self._deletes, offer.table) or (
            table is not None and table.copy_on_write
        )

        def there() -> Collection[str]:
            assert table is not None
            return self._format.data_files(folder, table.snapshot_id)

        verdict = decide(offer, table, head.term, current(known), there, copies_on_write=no_vectors)
        if isinstance(verdict, Refused):
            return Decided(request, offer, reason=verdict.reason)
        assert table is not None
        return self._accept(head, request, offer, verdict, table, known, stage)

    def _accept(
        self,
        head: Manifest,
        request: Request,
        offer: Offer,
        verdict: Accepted,
        table: TableVersion,
        known: Liveness,
        stage: Stage,
    ) -> Decided:
        folder = str(self._chain.root / offer.path)
        for file in offer.files:
            if (place(folder) / file.name).stat().st_size != file.size:
                return Decided(request, offer, reason=f"{file.name} has another size")
        if not (place(folder) / offer.run).exists():
            return Decided(request, offer, reason=f"{offer.run} is missing")
        if offer.merges:
            # No snapshot has the row index.
            return Decided(
                request, offer, replace(table, runs=with_merged(table.runs or (), offer))
            )
        by_name = {offer.files[number].name: gone for number, gone in verdict.removed.items()}
        vectors = self._vectors(offer, by_name, stage) if by_name else []
        runs = (
            *(table.runs or ()),
            (offer.run, offer.weight),
            *self._carried_run(folder, stage, vectors),
        )
        old = {file.name for file in offer.old}
        write = TableWrite(
            head.epoch,
            table.snapshot_id,
            str(stage),
            rows=[FileInfo(f"{folder}/{f.name}", f.rows, f.size, f.partition) for f in offer.files],
            vectors=vectors,
            replaced=[vector for name, vector in known.vectors.items() if name in old],
            removed=[
                FileInfo(f"{folder}/{f.name}", f.rows, f.size, f.partition)
                for f in known.current()
                if f.name in old
            ],
            count=table.rows,
            conversion=True,
        )
        self._committed.add(offer.name)
        done = self._format.write(folder, head.term, write)
        fail_point.hit("compaction-committed")
        made = replace(table, snapshot_id=done.snapshot, stage=str(stage), runs=runs)
        return Decided(request, offer, made)

    def _vectors(self, offer: Offer, removed: Mapping[str, BitMap64], stage: Stage) -> list[Vector]:
        """What removes these positions from the offer's files."""
        folder = str(self._chain.root / offer.path)
        by = by_position(self._format, self._deletes, offer.table, folder)
        write = write_positions if by else write_vectors
        partitions = {file.name: file.partition for file in offer.files}
        made = write(folder, f"{stage}-carried", removed)
        return [replace(vector, partition=partitions[vector.file]) for vector in made]

    def _carried_run(
        self, folder: str, stage: Stage, vectors: Sequence[Vector]
    ) -> tuple[tuple[str, int], ...]:
        """The run that says what is removed from the offer's files, if anything is."""
        if not vectors:
            return ()
        runs = add_files(folder, (), f"index/{stage}-carried.run", _NOTHING, (), vectors)
        return tuple((run.name, run.weight) for run in runs)


#: No rows are added.
_NOTHING = Identity(pa.schema([]), is_key=True)
