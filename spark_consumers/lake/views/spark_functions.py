"""What a view's SQL needs of a Spark session: settings on which its meaning depends, and functions besides Spark's own."""

from typing import TYPE_CHECKING, Final

from spark_consumers.lake.views.average import average
from spark_consumers.lake.views.translate import AVERAGE
from walsender_bridge.errors import NotSupportedError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Overflows are errors, as in PostgreSQL; texts and types are read as they are written here.
_SETTINGS: Final = {
    "spark.sql.ansi.enabled": "true",
    "spark.sql.parser.escapedStringLiterals": "false",
    "spark.sql.timestampType": "TIMESTAMP_LTZ",
}


def prepare(spark: "SparkSession") -> None:
    """Give this session the functions. Raises `NotSupportedError` if one of its settings gives the SQL another meaning."""
    for name, wanted in _SETTINGS.items():
        if (found := spark.conf.get(name, wanted)) != wanted:
            raise NotSupportedError(
                f"views need {name} = {wanted}, and this session has {found}",
                where="Spark",
                repair=f"omit {name} from Spark's settings",
            )
    spark.udf.register(AVERAGE, average, "string")
