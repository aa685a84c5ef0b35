"""Iceberg's own REST catalog for tests: its JDBC catalog in a PostgreSQL database, behind the server that its own tests use.

That server's code (`RESTCatalogAdapter`) is what other REST catalogs began with. Its jars are on Maven Central (14 MB, fetched once).
Tables have version 3, branches and tags, and are where their creator puts them. Requests need no token.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from spark_consumers.lake.catalog.rest_http import RestOptions
from tests.support.maven import fetched
from tests.support.s3 import BUCKET, KEYS
from walsender_bridge.runtime import cache

VERSION: Final = "1.11.0"
_ICEBERG, _JETTY, _TESTS = "org/apache/iceberg", "org/eclipse/jetty", "tests"
#: The SHA-256 of each jar, by its path. What else is needed comes with PySpark, and with the project's own jars for S3.
_JARS: Final = {
    f"{_ICEBERG}/iceberg-core/1.11.0/iceberg-core-1.11.0.jar": (
        "53b9eb7a8c34fb9958ea7d9a4d19ba5bc96f592d0f05e8625b0778c70b1f0090"
    ),
    f"{_ICEBERG}/iceberg-core/1.11.0/iceberg-core-1.11.0-{_TESTS}.jar": (
        "4284719a5f0eb7db01e9f784a0ed4ca8bacf7d6f9951924143afc083428d8be3"
    ),
    f"{_ICEBERG}/iceberg-api/1.11.0/iceberg-api-1.11.0.jar": (
        "f00675a12ceb6d833bb9c22024823a3e7afdedf7abcefe34719f45b0d211995a"
    ),
    f"{_ICEBERG}/iceberg-common/1.11.0/iceberg-common-1.11.0.jar": (
        "b2835d00db7c92bdfa728123ad7cdcb488e2f2805c1c51fb9ae94e8bd203bd7d"
    ),
    f"{_ICEBERG}/iceberg-bundled-guava/1.11.0/iceberg-bundled-guava-1.11.0.jar": (
        "396d48d93ef5735f2ddef0cf9b3d6968ebd67b64b5cfe753d41c429d3f46a2a1"
    ),
    f"{_ICEBERG}/iceberg-aws/1.11.0/iceberg-aws-1.11.0.jar": (
        "4cfe4a7ba3a4fb247a29e60c614678c3b7a1e9b4b91f54e0ca3406419c9338f0"
    ),
    "com/github/ben-manes/caffeine/caffeine/2.9.3/caffeine-2.9.3.jar": (
        "1e0a7bbef1dd791653143f3f05d0e489934bf5481e58a87c9e619cd46b68729b"
    ),
    "dev/failsafe/failsafe/3.3.2/failsafe-3.3.2.jar": (
        "2c5dc879a6dac7ea3a7b29d795e27bd49b8e7908b05c2f3e56053c19d79850f5"
    ),
    "jakarta/servlet/jakarta.servlet-api/6.0.0/jakarta.servlet-api-6.0.0.jar": (
        "c034eb1afb158987dbb53a5fea0cadf611c8dae8daadd59c44d9d5ab70129cef"
    ),
    f"{_JETTY}/ee10/jetty-ee10-servlet/12.1.8/jetty-ee10-servlet-12.1.8.jar": (
        "c6251faae241b2b6879ce8fb9177366ca4793ff9356f60793b8d10a1f1fef404"
    ),
    f"{_JETTY}/jetty-http/12.1.8/jetty-http-12.1.8.jar": (
        "32c351984fd74e7db9b3120f7aa43c034a9d7fe290386747ff318f4c4221d94b"
    ),
    f"{_JETTY}/jetty-io/12.1.8/jetty-io-12.1.8.jar": (
        "c45a68ceed3526f5ca0974768caa61f6683c3d5591a819fbcf3c0480a64ab245"
    ),
    f"{_JETTY}/jetty-security/12.1.8/jetty-security-12.1.8.jar": (
        "44add9ee95b955d96979cc74e32ec751ea807ebc0f5139eb13adcfc23712c58f"
    ),
    f"{_JETTY}/jetty-server/12.1.8/jetty-server-12.1.8.jar": (
        "71b8862a72305aebb65909b8b9f3c9a0c790ef3245c6056e56b48117aec238fe"
    ),
    f"{_JETTY}/jetty-session/12.1.8/jetty-session-12.1.8.jar": (
        "ebe84dd41942d7adda5f7d1304095d274e7915999451d848e887cbd409f947ea"
    ),
    f"{_JETTY}/jetty-util/12.1.8/jetty-util-12.1.8.jar": (
        "00432715f20c3ddc8d4fe3b01974253a7772f1830f7712da71af30348b01c822"
    ),
    "org/postgresql/postgresql/42.7.11/postgresql-42.7.11.jar": (
        "1981b31d3993c58702783c1cddf10a34e48c1f413d70ff1cb6def0a143484647"
    ),
    # A class of it is in a field of what reads the settings.
    "software/amazon/awssdk/kms/2.54.17/kms-2.54.17.jar": (
        "74945cc7916eaaab990432e211f2b2886ca445edc34abfecb86408f6f4dbdaee"
    ),
}
#: Those of PySpark that the server needs.
_OF_SPARK: Final = (
    *(
        "avro-1",
        "RoaringBitmap",
        "aircompressor",
        "commons-codec",
        "commons-compress",
        "commons-lang3",
    ),
    *("jackson-core-2", "jackson-databind", "jackson-annotations", "slf4j-api", "hadoop-client-"),
    *("httpclient-4", "httpcore-4"),
)


def jars() -> list[Path] | None:
    """The server's jars, fetched if need be; None where they cannot be."""
    folder = cache.folder() / "iceberg-server" / VERSION
    with cache.exclusive(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path, digest in _JARS.items():
            file = folder / path.rpartition("/")[2]
            if not fetched(path, digest, file):
                return None
    return [folder / path.rpartition("/")[2] for path in _JARS]


@contextlib.contextmanager
def iceberg_server(
    folder: Path,
    dsn: str,
    s3: str = "",
    *,
    warehouse: str = f"s3://{BUCKET}/of-the-catalog",
    keys: Mapping[str, str] = KEYS,
) -> Iterator[RestOptions]:
    """A server without tables, and how it is reached. Skips where it cannot be had.

    `dsn`: a database that it has its tables in. `s3`: the address of a server of S3 to which it writes metadata, with `keys`;
    without it the `warehouse` is a folder.
    """
    pytest.importorskip(
        "pyspark", reason="Iceberg's server runs in a JVM that PySpark's library starts"
    )
    import pyspark
    from py4j.java_gateway import JavaGateway

    from spark_consumers.spark import jars as of_spark
    from spark_consumers.spark import java

    own = jars()
    if own is None:
        pytest.skip(f"Iceberg's server {VERSION} needs its jars from Maven Central")
    spark = sorted((Path(pyspark.__file__).parent / "jars").glob("*.jar"))
    others = [jar for jar in spark if jar.name.startswith(_OF_SPARK)]
    bucket = of_spark.paths(wanted=of_spark.S3)
    with (folder / "iceberg-server.log").open("wb") as log:
        # It ends with this process: it reads its standard input.
        gateway = JavaGateway.launch_gateway(
            jarpath=str(next(jar for jar in spark if jar.name.startswith("py4j"))),
            classpath=":".join(map(str, [*own, *others, *bucket])),
            javaopts=[
                "-Xmx512m",
                "-XX:-UsePerfData",
                "-XX:TieredStopAtLevel=1",
                "-XX:+UseSerialGC",
            ],
            java_path=str(java.find().home / "bin" / "java"),
            die_on_exit=True,
            enable_auth=True,
            redirect_stdout=log,
            redirect_stderr=log,
        )
        try:
            yield RestOptions(_started(gateway, dsn, s3, warehouse, keys), allow_http=True)
        finally:
            gateway.shutdown()
            process = gateway.java_process
            process.stdin.close()
            process.kill()
            process.wait()


def _started(gateway: Any, dsn: str, s3: str, warehouse: str, keys: Mapping[str, str]) -> str:
    """Start the server in the JVM; its address."""
    jvm = gateway.jvm
    where = psycopg.conninfo.conninfo_to_dict(dsn)
    settings = {
        "catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
        "uri": f"jdbc:postgresql://{where['host']}:{where['port']}/{where['dbname']}",
        "jdbc.user": where["user"],
        "jdbc.password": where["password"],
        "jdbc.schema-version": "V1",
        "warehouse": warehouse,
        "clients": "8",
    }
    if s3:
        settings |= {
            "io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
            "s3.endpoint": s3,
            "s3.path-style-access": "true",
            "s3.access-key-id": keys["AWS_ACCESS_KEY_ID"],
            "s3.secret-access-key": keys["AWS_SECRET_ACCESS_KEY"],
            "client.region": "us-east-1",
        }
    properties = jvm.java.util.HashMap()
    for name, value in settings.items():
        properties.put(name, value)
    catalog = jvm.org.apache.iceberg.CatalogUtil.buildIcebergCatalog(
        "lakes", properties, jvm.org.apache.hadoop.conf.Configuration()
    )
    servlet = jvm.org.eclipse.jetty.ee10.servlet
    adapter = jvm.org.apache.iceberg.rest.RESTCatalogAdapter(catalog)
    holder = servlet.ServletHolder(jvm.org.apache.iceberg.rest.RESTCatalogServlet(adapter))
    context = servlet.ServletContextHandler()
    context.addServlet(holder, "/*")
    server = jvm.org.eclipse.jetty.server.Server(jvm.java.net.InetSocketAddress("127.0.0.1", 0))
    server.setHandler(context)
    server.start()
    return f"http://127.0.0.1:{server.getURI().getPort()}"
