"""The tables that an epoch makes for views and feeds: which folders of attempts go, and which stay."""

from dataclasses import replace
from unittest.mock import MagicMock

import pyarrow as pa

from spark_consumers.lake.epoch.new_tables import NewTables
from spark_consumers.lake.manifest.chain import Manifest
from spark_consumers.lake.manifest.feed_version import FeedVersion
from spark_consumers.lake.policy import POSITION_DELETES

COLUMNS = pa.schema([("n", pa.int64())])
FEED = "shop.public.orders_changes"


def test_no_folder_goes_that_a_link_may_name_whose_publication_was_not_confirmed(tmp_path):
    """After an error of the store, the writer may go on from a head behind which its own link was published."""
    chain, tables = MagicMock(root=tmp_path), MagicMock()
    tables.name = "iceberg"
    new = NewTables(chain, tables, 1, {})
    head = Manifest("lake", 6, 7, 6, 1, 0.0)
    made = new.create(FEED, COLUMNS, relation_id=7)
    chain.has.side_effect = lambda link: link <= 7
    new.remove_unnamed(head)
    tables.drop.assert_not_called()
    feeds = {FEED: FeedVersion("shop.public.orders", "tables/orders", made, start_lsn=0)}
    new.remove_unnamed(replace(head, link=7, feeds=feeds))
    tables.drop.assert_not_called()
    left = new.create(FEED, COLUMNS)
    chain.has.side_effect = lambda link: link <= 6
    new.remove_unnamed(head)
    tables.drop.assert_called_once_with(str(tmp_path / left.path))
    new.remove_unnamed(head)
    tables.drop.assert_called_once()


def test_tables_that_other_engines_read_have_no_deletion_vectors(tmp_path):
    tables = MagicMock()
    tables.name = "iceberg"
    for deletes, vectors in (({}, True), ({"default": POSITION_DELETES}, False)):
        new = NewTables(MagicMock(root=tmp_path), tables, 1, deletes)
        made = new.create(FEED, COLUMNS)
        tables.create.assert_called_with(str(tmp_path / made.path), COLUMNS, vectors=vectors)
