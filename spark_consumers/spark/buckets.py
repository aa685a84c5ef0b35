"""How Spark's JVM reaches a bucket of S3: Hadoop's S3A, under the scheme `s3` that Iceberg's metadata names files by.

Iceberg opens a table by its location through Hadoop's file systems and in no other way, so a lake without a catalog service
needs one for S3. The settings are of one bucket each; Hadoop has one client for each bucket and JVM, made when it is first used.
Keys are not among them: they come from the environment of the JVM, or the machine's role.
Tables in a REST catalog are reached in the same way, whatever client of S3 the catalog names (`HADOOP_FILE_IO`): the tasks, which write
without a JVM, have no other keys.
"""

import os
from collections.abc import Mapping
from typing import Any, Final, cast
from urllib.parse import urlsplit

from walsender_bridge.errors import NotSupportedError, UnavailableError, UsageError

#: The file system, and a class of the SDK that it needs.
CLASSES: Final = (
    "org.apache.hadoop.fs.s3a.S3AFileSystem",
    "software.amazon.awssdk.services.s3.S3Client",
)
#: What of Iceberg reads and writes files by Hadoop's file systems.
HADOOP_FILE_IO: Final = "org.apache.iceberg.hadoop.HadoopFileIO"
#: What the prefix is of Hadoop's settings in those of a session that is started.
_STARTED: Final = "spark.hadoop."
_ANY_REGION: Final = "us-east-1"
#: The catalog by which Iceberg's data source opens a table at a location.
_OF_LOCATIONS: Final = "default_iceberg"
_ICEBERG_CATALOG: Final = "org.apache.iceberg.spark.SparkCatalog"


def is_bucket(location: object) -> bool:
    """Whether this is a location in a bucket."""
    return str(location).startswith("s3://")


def settings(location: object, endpoint: str | None, region: str | None) -> dict[str, str]:
    """Hadoop's settings for the bucket of this location, none for a folder. `endpoint`, `region`: None: as the environment says."""
    if not is_bucket(location):
        return {}
    endpoint, region = _completed(endpoint, region)
    found = {
        "aws.credentials.provider": "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider",
        "connection.timeout": "30s",
        # Of manifests, which are small: nothing is left in a folder for temporary files.
        "fast.upload.buffer": "bytebuffer",
    }
    if endpoint:
        # Other servers than Amazon's have no name for each bucket.
        found |= {"endpoint": endpoint, "path.style.access": "true"}
    if region:
        found["endpoint.region"] = region
    bucket = urlsplit(str(location)).netloc
    return {
        "fs.s3.impl": CLASSES[0],
        # Objects have no checksums beside them, but the pages of data files have their own.
        "parquet.page.verify-checksum.enabled": "true",
        **{f"fs.s3a.bucket.{bucket}.{name}": value for name, value in found.items()},
    }


def read(location: object, name: str, endpoint: str | None, region: str | None) -> bytes | None:
    """The object of this name below a location; None if there is none, or no such bucket. Raises `UnavailableError`, `UsageError`."""
    # Not imported where lakes are in folders.
    import obstore
    from obstore.exceptions import BaseError, NotFoundError
    from obstore.store import S3Store

    parts = urlsplit(str(location))
    is_http = (endpoint or "").startswith("http://")
    allowed = os.environ.get("AWS_ALLOW_HTTP", "").lower() in {"1", "true"}
    named = _completed(endpoint, region)[0] or ""
    if endpoint is None and named.startswith("http://") and not allowed:
        # The client would name neither the address nor what it lacks.
        raise UsageError(
            f"the endpoint {named.rpartition('@')[2]} does not use TLS",
            where="AWS_ENDPOINT_URL",
            repair="use https://, or set AWS_ALLOW_HTTP=true if the network is trusted",
        )
    given = {"endpoint": endpoint, "region": region}
    store = S3Store(
        parts.netloc,
        prefix=parts.path.strip("/"),
        config=cast("Any", {key: value for key, value in given.items() if value}),
        client_options={"allow_http": is_http or allowed},
    )
    try:
        return obstore.get(store, name).bytes().to_bytes()
    except (NotFoundError, FileNotFoundError):
        return None
    except BaseError as error:
        raise UnavailableError(
            f"the bucket cannot be read: {str(error).strip().partition(chr(10))[0][:300]}",
            where=f"{str(location).rstrip('/')}/{name}",
            repair="check its endpoint and region, and the keys in the environment",
        ) from None


def _completed(endpoint: str | None, region: str | None) -> tuple[str | None, str | None]:
    """What is not given as the environment says; a server with an address of its own has some region."""
    environment = os.environ
    endpoint = (
        endpoint or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    )
    region = region or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    return endpoint, region or (_ANY_REGION if endpoint else None)


def of_started(hadoop: Mapping[str, str]) -> dict[str, str]:
    """The same as settings of a session that is started."""
    return {f"{_STARTED}{name}": value for name, value in hadoop.items()}


def use(spark: Any, location: object, endpoint: str | None, region: str | None) -> None:
    """Have a session that runs reach the bucket of this location, unless it was started with settings for it.

    Raises `NotSupportedError` for a JVM without the jars (that of a session of Spark Connect is out of sight), and `UsageError`
    if the session reaches a bucket of this name elsewhere already.
    """
    if not is_bucket(location):
        return
    jvm = getattr(spark, "_jvm", None)
    if jvm is not None:
        check(jvm)
    wanted = settings(location, endpoint, region)
    for name, value in wanted.items():
        known = spark.conf.get(f"{_STARTED}{name}", None) or spark.conf.get(name, None)
        if known is None:
            spark.conf.set(name, value)
        elif known != value and name.endswith(".endpoint"):
            raise UsageError(
                f"this Spark session has {name} = {known}, not {value}",
                repair="start another session for a bucket of the same name at another endpoint",
            )
    if jvm is not None:
        _tell_iceberg(spark, wanted)


def _tell_iceberg(spark: Any, wanted: Mapping[str, str]) -> None:
    """Have Iceberg's catalog of tables by location reach the bucket, too.

    It is made when a session reads its first table, and keeps the settings of that moment: of one that has read a lake in a
    folder, or in another bucket, Iceberg itself offers no way to add any.
    """
    if spark.conf.get(f"spark.sql.catalog.{_OF_LOCATIONS}", None) != _ICEBERG_CATALOG:
        # No table has been read yet, or the user has a catalog of another kind there.
        return
    session = spark._jsparkSession  # noqa: SLF001  # PySpark has no public way to it
    catalog = session.sessionState().catalogManager().catalog(_OF_LOCATIONS)
    field = catalog.getClass().getDeclaredField("tables")
    field.setAccessible(True)
    kept = field.get(catalog).getConf()
    for name, value in wanted.items():
        if kept.get(name) is None:
            kept.set(name, value)


def check(jvm: Any) -> None:
    """Raise `NotSupportedError` unless the JVM has the jars for S3."""
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    if any(loader.getResource(f"{name.replace('.', '/')}.class") is None for name in CLASSES):
        raise without_jars()


def without_jars() -> NotSupportedError:
    """The error of a JVM that lacks the jars."""
    from spark_consumers.spark import jars

    return NotSupportedError(
        "Spark's JVM was started without the jars for S3",
        repair=f"start it with them: spark-submit --packages {','.join(jars.S3.coordinates)}"
        f" --exclude-packages {','.join(jars.S3.excluded)}, or the session of spark_consumers",
    )
