"""An offer of a maintainer: what it may be made of, and what becomes of one that cannot be taken."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_consumers.lake.catalog.folder_catalog import FolderCatalog
from spark_consumers.lake.catalog.table_catalog import Outcome, TableCommit, TableId, set_ref
from spark_consumers.lake.compaction import rewrite
from spark_consumers.lake.compaction.offer import OFFERS, Offer, OfferName
from spark_consumers.lake.compaction.plan import Group, groups
from spark_consumers.lake.compaction.rewrite import compactable, liveness_of, prepare, states
from spark_consumers.lake.format.data_files import Stage, write_data
from spark_consumers.lake.format.iceberg_schema import arrow_schema, iceberg_schema
from spark_consumers.lake.format.table_format import TableFormat
from spark_consumers.lake.index.build import Identity, add_files
from spark_consumers.lake.layout.arrangement import PLAIN
from spark_consumers.lake.manifest.chain import Chain, Manifest, open_chain
from spark_consumers.lake.manifest.sealed_json import dump, parse
from spark_consumers.lake.manifest.table_version import TableVersion
from spark_consumers.lake.writer import requests
from spark_consumers.lake.writer.compactions import Compactions
from tests.support import avro_file
from walsender_bridge.errors import CorruptError, FencedError, LakeError, UnavailableError

PATH, NAME = "tables/s/public/docs%t1-aa", "s.public.docs"


@dataclass
class Lake:
    """A lake in a folder with one table of four small files: `id` rises from file to file, `n` falls."""

    root: Path
    catalog: FolderCatalog
    table: TableVersion

    def due(self) -> list[Group]:
        """What a maintainer plans now."""
        files = states(liveness_of(str(self.root / PATH), self.table))
        return groups(compactable(self.metadata(), files), 128 << 20)

    def prepare(self, due: list[Group]) -> Offer:
        return prepare(self.root, self.catalog, NAME, self.table, OfferName(1, "abc", 1), due)

    def change(self, *updates: Mapping[str, Any]) -> None:
        """Make these updates of the table's metadata, as a writer of the same term does."""
        there = self.catalog.load(TableId.at(PATH))
        assert there is not None
        commit = TableCommit(TableId.at(PATH), [], list(updates), there.location)
        assert self.catalog.commit(commit) is Outcome.WON

    def metadata(self) -> Any:
        there = self.catalog.load(TableId.at(PATH))
        assert there is not None
        return there.metadata


def written_manifests(folder: Path, files: list[str]) -> Path:
    """A manifest list of these data files, with what is read of it here: they have no row ids, which are not of interest."""
    there = {"file_path": "string", "record_count": "long"}
    entry = {"status": "int", "data_file": avro_file.record("file", there)}
    added = [{"status": 1, "data_file": {"file_path": each, "record_count": 5}} for each in files]
    avro_file.write(folder / "manifest-1.avro", entry, added)
    named = {"manifest_path": "string", "sequence_number": "long"}
    one = {"manifest_path": str(folder / "manifest-1.avro"), "sequence_number": 1}
    avro_file.write(folder / "snap-1.avro", named, [one])
    return folder / "snap-1.avro"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    catalog, folder = FolderCatalog(tmp_path), tmp_path / PATH
    columns = pa.schema([("id", pa.int64()), ("n", pa.int64())])
    assert catalog.create(TableId.at(PATH), iceberg_schema(columns), {}) is Outcome.WON
    there = catalog.load(TableId.at(PATH))
    assert there is not None
    schema = arrow_schema(there.metadata["schemas"][0])
    runs: Any = ()
    files: list[str] = []
    for number in range(4):
        ids = list(range(5 * number, 5 * number + 5))
        file = write_data(
            f"{folder}/data/{number + 1:020d}-t1-a1.parquet",
            [pa.array(ids), pa.array([100 - each for each in ids])],
            schema,
        )
        assert file is not None
        files.append(file.path)
        run = f"index/{number + 1:020d}-t1-a1.run"
        runs = add_files(str(folder), runs, run, Identity.of(("id",), schema), [file])
    manifests = written_manifests(folder / "metadata", files)
    table = TableVersion(
        PATH,
        "iceberg",
        7,
        "",
        ("id",),
        (),
        0,
        0,
        20,
        1,
        runs=tuple((run.name, run.weight) for run in runs),
        layout=(("id", 20, -1), ("n", 20, -1)),
    )
    made = Lake(tmp_path, catalog, table)
    snapshot = {
        "snapshot-id": 7,
        "sequence-number": 1,
        "timestamp-ms": 1,
        "manifest-list": str(manifests),
        "schema-id": 0,
        "summary": {"operation": "append"},
        "first-row-id": 0,
        "added-rows": 20,
    }
    made.change(
        {"action": "add-snapshot", "snapshot": snapshot},
        set_ref("tuskline_t1", 7, "branch"),
        set_ref("main", 7, "branch"),
    )
    return made


def sort_by_n(lake: Lake) -> None:
    field = {
        "transform": "identity",
        "source-id": 2,
        "direction": "asc",
        "null-order": "nulls-last",
    }
    lake.change(
        {"action": "add-sort-order", "sort-order": {"order-id": 1, "fields": [field]}},
        {"action": "set-default-sort-order", "sort-order-id": 1},
    )


def partition_by_n(lake: Lake) -> None:
    field = {"source-id": 2, "field-id": 1000, "name": "n", "transform": "identity"}
    lake.change(
        {"action": "add-spec", "spec": {"spec-id": 1, "fields": [field]}},
        {"action": "set-default-spec", "spec-id": 1},
    )


# -- what it is made of -----------------------------------------------------------------------------


def test_the_rows_of_an_offer_are_in_the_order_that_they_had(lake: Lake) -> None:
    offer = lake.prepare(lake.due())
    made = pq.read_table(lake.root / PATH / offer.files[0].name)
    assert made.column("id").to_pylist() == list(range(20))
    assert [each.start for each in offer.old] == [0, 5, 10, 15]
    sort_by_n(lake)
    target = rewrite._target("", lake.metadata(), NAME, lake.table, OfferName(1, "abc", 1))
    assert target.arrangement == PLAIN


@pytest.mark.parametrize("change", [sort_by_n, partition_by_n])
def test_no_offer_is_made_once_the_layout_is_another(
    lake: Lake, change: Callable[[Lake], None]
) -> None:
    due = lake.due()
    assert due
    change(lake)
    with pytest.raises(LakeError, match="since the plan"):
        lake.prepare(due)
    assert not lake.due()


# -- one that cannot be taken -----------------------------------------------------------------------


class Damaged:
    """A table format whose tables raise this when their files are to be removed."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def sweep(self, *_: Any) -> int:
        raise self.error


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    made = open_chain(tmp_path / "lake")
    made.initialise("log", "iceberg")
    made.store.prepare(OFFERS)
    return made


def offered(chain: Chain, term: int) -> tuple[Manifest, Offer]:
    """A head under the second term, and an offer that has a data file, with its record."""
    table = TableVersion(PATH, "iceberg", 7, "", ("id",), (), 0, 0, 20, 1, state="stale", runs=())
    head = Manifest("lake", 10, 2, 0, 100, 0.0, tables={NAME: table})
    name = OfferName(term, "abc", 1)
    offer = Offer(str(name), NAME, PATH, term, ("id",))
    file = Path(str(chain.root), PATH, f"data/{name.prefix}rewritten-0.parquet")
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")
    chain.store.create(f"{OFFERS}/{name}", dump(offer.to_json()))
    return head, offer


@pytest.mark.parametrize("error", [CorruptError("damaged"), UnavailableError("silent"), OSError(5)])
def test_an_offer_for_a_damaged_table_is_answered_and_stops_no_round(
    chain: Chain, error: Exception
) -> None:
    head, offer = offered(chain, term=1)
    requests.ask(chain, requests.COMPACT, [NAME], offer=offer.name)
    writer = Compactions(chain, cast(TableFormat, Damaged(error)), {})
    decided = writer.decided(head, list(requests.waiting(chain)), Stage(11, 2, 1))
    writer.settle(head, decided)
    record = parse(chain.store.read(f"{OFFERS}/{offer.name}"), "")
    assert not record["accepted"]
    assert "term 1" in record["reason"]


@pytest.mark.parametrize("error", [CorruptError("damaged"), UnavailableError("silent"), OSError(5)])
def test_an_offer_of_a_dead_maintainer_for_a_damaged_table_is_forgotten(
    chain: Chain, error: Exception
) -> None:
    head, _ = offered(chain, term=1)
    assert Compactions(chain, cast(TableFormat, Damaged(error)), {}).sweep(head, ()) == 1
    assert not list(chain.store.names(OFFERS))


def test_a_fenced_writer_does_not_answer_an_offer(chain: Chain) -> None:
    head, offer = offered(chain, term=1)
    requests.ask(chain, requests.COMPACT, [NAME], offer=offer.name)
    writer = Compactions(chain, cast(TableFormat, Damaged(FencedError("taken over"))), {})
    decided = writer.decided(head, list(requests.waiting(chain)), Stage(11, 2, 1))
    with pytest.raises(FencedError):
        writer.settle(head, decided)
    assert "accepted" not in parse(chain.store.read(f"{OFFERS}/{offer.name}"), "")
