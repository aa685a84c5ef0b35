"""How Iceberg's library in the JVM reaches the files at a location: Hadoop's settings, and FileIO."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from pyspark.sql import SparkSession

from spark_consumers.spark import buckets

#: The implementation for a location's scheme, where the catalog names none.
_OF_SCHEME = {
    "gs": "org.apache.iceberg.gcp.gcs.GCSFileIO",
    "abfss": "org.apache.iceberg.azure.adlsv2.ADLSFileIO",
}
_IMPLEMENTATION = "io-impl"


def hadoop_settings(spark: SparkSession) -> Any:
    """The session's settings of Hadoop, for tables' own files.

    Hadoop's local file system starts a `chmod` for each file it makes, and two where it writes a checksum beside it: a
    commit has half a dozen. So it neither makes checksums here nor verifies them.
    """
    jvm: Any = spark._jvm  # noqa: SLF001  # PySpark has no public way to its JVM
    session = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001  # as above
    configuration = jvm.org.apache.hadoop.conf.Configuration(session)
    configuration.set("fs.file.impl", "org.apache.hadoop.fs.RawLocalFileSystem")
    configuration.set("fs.file.impl.disable.cache", "true")
    return configuration


def file_io(spark: SparkSession, location: str, config: Mapping[str, str]) -> Any:
    """The FileIO of a table at this location, with the settings that its catalog gave for it: keys are among them.

    A bucket of S3 is reached as the lake is, by the session's settings (`spark.buckets`): a catalog's keys are not needed there.
    """
    jvm: Any = spark._jvm  # noqa: SLF001  # as above
    properties = jvm.java.util.HashMap()
    for name, value in config.items():
        properties.put(name, value)
    of_scheme = _OF_SCHEME.get(urlsplit(location).scheme, buckets.HADOOP_FILE_IO)
    chosen = config.get(_IMPLEMENTATION) or of_scheme
    if buckets.is_bucket(location):
        chosen = buckets.HADOOP_FILE_IO
    return jvm.org.apache.iceberg.CatalogUtil.loadFileIO(chosen, properties, hadoop_settings(spark))
