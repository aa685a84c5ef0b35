"""Append every committed change to Parquet files, from a Spark session of your own.

    JAVA_HOME=... python own_session.py grpc://127.0.0.1:7400 /srv/changes

Spark finds `format("tuskline")` in any session of PySpark 4.1, without registering it and without a lake. Run the
program as often as you like, for instance from cron: each run appends the changes that were committed since the last.
"""

import sys

from pyspark.sql import SparkSession


def main(log: str, folder: str) -> None:
    """Append what was committed since the last run to `folder`."""
    spark = (
        SparkSession.builder.appName("own_session")
        .master("local[2]")
        # Times are shown in UTC.
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    changes = (
        spark.readStream.format("tuskline")
        .option("log", log)
        # A lease of this name keeps the log for the next run, for a day (consumerLeaseSeconds).
        .option("consumer", "own_session")
        .load()
    )
    query = (
        changes.select("version", "stream", "relation", "op", "before", "after")
        .writeStream.format("parquet")
        .option("path", f"{folder}/files")
        # The checkpoint has the position in the log. A run that starts from it neither skips nor repeats a change,
        # whenever the last one was killed. Without it, a run would begin with the oldest change of the log.
        .option("checkpointLocation", f"{folder}/checkpoint")
        # Ends when it has read all that the log had when it started.
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
