"""Keep a table of your own equal to a table of PostgreSQL, with foreachBatch and MERGE.

    python merge_batches.py grpc://127.0.0.1:7400 /srv/lake /srv/mine

The first run copies `public.orders` (id integer PRIMARY KEY, status text) from the newest epoch of the lake; this and
each further run merge the changes after it. The table has to have changed since Tuskline was attached: before that, the log
does not know its columns, and the program ends with an error that says so. A table of the lake is such a table already:
do this where the target has to be another one.
"""

import sys

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tuskline import read, session

TARGET = "mine.shop.orders"
#: The epoch that the target was copied from: an epoch is a version of the log, so the changes begin with the next one.
EPOCH = "copied_epoch"


def main(log: str, lake: str, folder: str) -> None:
    """Merge what was committed since the last run into the target, a table in `folder`."""
    catalog = "spark.sql.catalog.mine"
    spark = session(
        "merge_batches",
        lake=lake,
        conf={
            catalog: "org.apache.iceberg.spark.SparkCatalog",
            f"{catalog}.type": "hadoop",
            f"{catalog}.warehouse": folder,
        },
    )
    if not spark.catalog.tableExists(TARGET):
        copy(spark, lake)
    epoch = spark.sql(f"SHOW TBLPROPERTIES {TARGET} ('{EPOCH}')").first()
    assert epoch is not None
    changes = (
        spark.readStream.format("tuskline")
        .option("log", log)
        .option("mode", "table")
        .option("tables", "public.orders")
        # Counts for the first run only; after that, the checkpoint has the position.
        .option("startingVersion", int(epoch["value"]) + 1)
        .option("consumer", "merge_batches")
        .load()
    )
    query = (
        changes.writeStream.foreachBatch(merge)
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


def copy(spark: SparkSession, lake: str) -> None:
    """Create the target from the lake. The table and the epoch that it has are written in one step."""
    snapshot = read(spark, lake)
    writer = snapshot["public.orders"].select("id", "status").writeTo(TARGET)
    writer.tableProperty(EPOCH, str(snapshot.epoch)).create()


def merge(batch: DataFrame, _number: int) -> None:
    """Merge one batch, which contains whole transactions.

    Spark repeats a batch if the program ended before the checkpoint was written. Each row below has the state after
    the batch, so that merging it twice changes nothing.
    """
    if not batch.where("_op = 'T' OR size(_unchanged) > 0").isEmpty():
        # A longer program would empty the target, and keep the target's values of the columns in _unchanged.
        raise ValueError("TRUNCATE, or an unchanged TOAST value: start again with a new folder")
    position = ["_version", "_offset", "_sequence"]
    written = batch.where("_op <> 'D'").select("id", "status", *position, f.lit(1).alias("alive"))
    # A DELETE, and the old key of an UPDATE that changed it.
    removed = batch.where("_before IS NOT NULL").select(
        "_before.id", f.lit(None).alias("status"), *position, f.lit(0).alias("alive")
    )
    # A row may change several times in a batch: its last change counts, and of an UPDATE what it wrote.
    last = f.max_by(f.struct("status", "alive"), f.struct(*position, "alive"))
    newest = written.union(removed).groupBy("id").agg(last.alias("last")).select("id", "last.*")
    newest.createOrReplaceTempView("newest")
    newest.sparkSession.sql(f"""
        MERGE INTO {TARGET} AS t USING newest AS n ON t.id = n.id
        WHEN MATCHED AND n.alive = 0 THEN DELETE
        WHEN MATCHED THEN UPDATE SET status = n.status
        WHEN NOT MATCHED AND n.alive = 1 THEN INSERT (id, status) VALUES (n.id, n.status)
    """)


if __name__ == "__main__":
    main(*sys.argv[1:])
