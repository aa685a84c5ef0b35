"""A metadata file that has its name is the table's: what fails behind that does not fail the commit."""

import errno
from pathlib import Path

import pytest

from spark_consumers.lake.catalog.folder_catalog import FolderCatalog
from spark_consumers.lake.catalog.table_catalog import Outcome, TableCommit
from spark_consumers.lake.format import checksums, iceberg_files
from spark_consumers.lake.format.iceberg_files import versions_in
from tests.support.lake.table_commits import ORDERS, SCHEMA
from walsender_bridge.errors import UnavailableError

UPDATE = {"action": "set-properties", "updates": {"made": "yes"}}


def committed(catalog: FolderCatalog) -> Outcome:
    there = catalog.load(ORDERS)
    assert there is not None
    return catalog.commit(TableCommit(ORDERS, [], [UPDATE], there.location))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), UnavailableError("no answer")])
@pytest.mark.parametrize(
    ("of", "step"),
    [(checksums, "seal"), (iceberg_files, "_hint"), (iceberg_files, "_remove_old")],
)
def test_a_commit_is_won_whatever_fails_behind_it(tmp_path, monkeypatch, of, step, error):
    catalog = FolderCatalog(tmp_path)
    catalog.create(ORDERS, SCHEMA, {})

    def fails(*_: object) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(of, step, fails)
        assert committed(catalog) is Outcome.WON
    there = catalog.load(ORDERS)
    assert there is not None
    assert there.metadata["properties"]["made"] == "yes"
    # The next commit mends what it can.
    assert committed(catalog) is Outcome.WON
    folder = catalog.folder(ORDERS) / "metadata"
    assert versions_in(folder) == [1, 2, 3]
    assert (folder / "version-hint.text").read_text() == "3"


def test_a_hint_that_cannot_be_replaced_fails_no_commit(tmp_path):
    catalog = FolderCatalog(tmp_path)
    catalog.create(ORDERS, SCHEMA, {})
    hint = Path(str(catalog.folder(ORDERS))) / "metadata" / "version-hint.text"
    hint.unlink()
    hint.mkdir()
    assert committed(catalog) is Outcome.WON
    there = catalog.load(ORDERS)
    assert there is not None
    assert there.location.endswith("/v2.metadata.json")
