"""The functions that a view's SQL needs on Spark, besides Spark's own."""

from typing import TYPE_CHECKING

from spark_consumers.lake.views.average import average
from spark_consumers.lake.views.translate import AVERAGE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: "SparkSession") -> None:
    """Give them to this session."""
    spark.udf.register(AVERAGE, average, "string")
