"""The jars that Spark needs for its table formats, by exact coordinates.

They are resolved once, by Spark's own resolver with whatever repositories Spark is set up to use
(`spark-defaults.conf`, `DEFAULT_ARTIFACT_REPOSITORY`), and kept as files: a session that names files starts
without a network. A set is complete when its folder exists: it is made aside and renamed. Whatever the
repository served, only jars with the SHA-256 that is written here become part of it.

`python -m spark_consumers.spark.jars` fetches them and prints where they are; `... jars s3` those for a lake in a bucket, too.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path

from spark_consumers.spark import java
from walsender_bridge.errors import CorruptError, UnavailableError
from walsender_bridge.runtime import cache as local_cache

ICEBERG = "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0"
DELTA = "io.delta:delta-spark_4.1_2.13:4.4.0"
COORDINATES = (ICEBERG, DELTA)
#: The version that Iceberg is built with.
_AWS = "2.54.17"


@dataclass(frozen=True, slots=True)
class JarSet:
    """What is resolved at once, and which of its dependencies are left out."""

    coordinates: tuple[str, ...]
    excluded: tuple[str, ...] = ()


TABLES = JarSet(COORDINATES)
#: Hadoop's file system for S3, with those parts of Amazon's SDK that it needs: 14 MB instead of the SDK's 600 in one jar.
S3 = JarSet(
    (
        "org.apache.hadoop:hadoop-aws:3.4.2",
        f"software.amazon.awssdk:s3:{_AWS}",
        f"software.amazon.awssdk:sts:{_AWS}",
        f"software.amazon.awssdk:s3-transfer-manager:{_AWS}",
        f"software.amazon.awssdk:apache-client:{_AWS}",
    ),
    (
        "software.amazon.awssdk:bundle",
        "org.wildfly.openssl:wildfly-openssl",
        "software.amazon.s3.analyticsaccelerator:analyticsaccelerator-s3",
    ),
)
#: The SHA-256 of each jar that is kept, by the name that Spark's resolver gives it.
SHA256 = {
    "com.fasterxml.jackson.datatype_jackson-datatype-jdk8-2.13.5.jar": (
        "e58761751fea8a00dc626aae1c5f1be38c5cfd487aeb333d933a4ab5f5a73c55"
    ),
    "commons-logging_commons-logging-1.3.0.jar": (
        "66d3c980470b99b0c511dad3dfc0ae7b265ec1fb144e96bc0253a8a175fd34d9"
    ),
    "io.delta_delta-kernel-api-4.4.0.jar": (
        "ee9b5a14ac3b7efdff4d61a58478fe8eb0e5a3fbca43889dca7290795fe79a11"
    ),
    "io.delta_delta-kernel-defaults-4.4.0.jar": (
        "225c975199e4718b38ee5b7e6da7f19e9585024262b2cec2656b32151a856b0b"
    ),
    "io.delta_delta-kernel-unitycatalog-4.4.0.jar": (
        "cea22dfb4ac562b3cd27bf652697750e8336009d73fb06631363aaaad5345ffa"
    ),
    "io.delta_delta-spark_4.1_2.13-4.4.0.jar": (
        "75a9400986853c061f5109f012547de2545a5759e5e752e5ef633dabe16a4f10"
    ),
    "io.delta_delta-storage-4.4.0.jar": (
        "c46735481fa8e326b0957be02b4420cbcab4b325bb08009b7f2045a95133f1cc"
    ),
    "io.unitycatalog_unitycatalog-client-0.6.0.jar": (
        "48257499a86b801a3e2372cec55ac226ca1c1c7eabe5c118e7302f29a1fdbc19"
    ),
    "io.unitycatalog_unitycatalog-hadoop-0.6.0.jar": (
        "c47b63c961c87102b9e1d63809a0915ba4c86b7652f57c8d39ca3a05b441a150"
    ),
    "javax.annotation_javax.annotation-api-1.3.2.jar": (
        "e04ba5195bcd555dc95650f7cc614d151e4bcd52d29a10b8aa2197f3ab89ab9b"
    ),
    "org.apache.iceberg_iceberg-spark-runtime-4.1_2.13-1.12.0.jar": (
        "3123c3798af642dd537230923548e013ef41cc28b6626e5225808cf5670a0f82"
    ),
    "org.roaringbitmap_shims-0.9.25.jar": (
        "0b82ed6cb1caf0706304b42358d568eb6faf190eadea7f2b2d365cb63156b40d"
    ),
    "commons-logging_commons-logging-1.2.jar": (
        "daddea1ea0be0f56978ab3006b8ac92834afeefbd9b7e4e6316fca57df0fa636"
    ),
    "org.apache.hadoop_hadoop-aws-3.4.2.jar": (
        "d2d24e6b715b5656b9d238bf13b6682a07e2004dd36aad74a73aeb854319f4d9"
    ),
    "org.apache.httpcomponents.client5_httpclient5-5.6.4.jar": (
        "bdef5f8841145cd76c4c605ff301bc840eea0d5292332b7b892a93316c0d8ee1"
    ),
    "org.apache.httpcomponents.core5_httpcore5-5.4.3.jar": (
        "18bfbbabb478dfb67f31aeaf428c387f3c3df654582e1309f708ee1f3086830a"
    ),
    "org.apache.httpcomponents.core5_httpcore5-h2-5.4.3.jar": (
        "c7db7026b8e2dea39132b04a6069f6671e2858309b20a146ec5c7dd6ed73a0b6"
    ),
    "org.reactivestreams_reactive-streams-1.0.4.jar": (
        "f75ca597789b3dac58f61857b9ac2e1034a68fa672db35055a8fb4509e325f28"
    ),
    "software.amazon.awssdk_annotations-2.54.17.jar": (
        "f136c28a8841bff1e538bf10b4d9dc8c54621d2f812a1612985da9daecccb388"
    ),
    "software.amazon.awssdk_apache-client-2.54.17.jar": (
        "0b00ae3d55c3d1213ca47b5651dc4c2a0080fc9b6192dde3d53c3da6c1811bcb"
    ),
    "software.amazon.awssdk_apache5-client-2.54.17.jar": (
        "871e7b53b7329bd1fc19b7252dcadbaeb9cb072fde2b05fe005b815d64a9d50e"
    ),
    "software.amazon.awssdk_arns-2.54.17.jar": (
        "c95c78e5fa26d4d88cb252988d3ac87ee40f3a03662b5dee7adaf259b18c97f2"
    ),
    "software.amazon.awssdk_auth-2.54.17.jar": (
        "ab9ff0c662d8653ea9acb59f79a95e34a6eca3a824e75497add8cf2c89252fca"
    ),
    "software.amazon.awssdk_aws-core-2.54.17.jar": (
        "1d9644f510edc6d9a28e5cdd933a2e57a343fe714b216836233b648361c7bd75"
    ),
    "software.amazon.awssdk_aws-query-protocol-2.54.17.jar": (
        "1998851761d17faaca6d627fb321920f632c2dbf4a352cbc537373625ed0cc52"
    ),
    "software.amazon.awssdk_aws-xml-protocol-2.54.17.jar": (
        "5bfe77d8449c1e4d78203365aaafd33bd5dcfa2d9a151d3d2979168d1ccd5db8"
    ),
    "software.amazon.awssdk_checksums-2.54.17.jar": (
        "f3b4db1b2648b1aa0b55811e9548cfef544e901c1c9c785eea402e37d834af5a"
    ),
    "software.amazon.awssdk_checksums-spi-2.54.17.jar": (
        "dbb45658bd5be8b4232ebc626a16c850d8155c6ad0ac38c7950ef31db1cf6053"
    ),
    "software.amazon.awssdk_crt-core-2.54.17.jar": (
        "6c82723f00fdb48a895225dea278274db8f7755678a1204f0490b374434e91b0"
    ),
    "software.amazon.awssdk_endpoints-spi-2.54.17.jar": (
        "9c303d27894ba63a53a1cc141a08f0331e37e903a9b0144d1179bf7f49a0264b"
    ),
    "software.amazon.awssdk_http-auth-2.54.17.jar": (
        "f2b75db255e032e1c88f0019a2064079b35d8895aa5d8f9a1151686380b421f4"
    ),
    "software.amazon.awssdk_http-auth-aws-2.54.17.jar": (
        "6b9c8a7cb7fe56fd9da4cec47295cb8ee177cc8c369cd34afb3c1fe25012bc28"
    ),
    "software.amazon.awssdk_http-auth-aws-eventstream-2.54.17.jar": (
        "5a480d2cb1190ccbbef273f511bd8aab76ca1fd52d313022afd4f5e31451095e"
    ),
    "software.amazon.awssdk_http-auth-spi-2.54.17.jar": (
        "c9ec1fcea7936beb7c18d73ccd5011653125b950de3590a0000676f7c06eded3"
    ),
    "software.amazon.awssdk_http-client-spi-2.54.17.jar": (
        "77848741c05636c40e23eb00aac514d4aae57d420582e03063e4d0543e78a409"
    ),
    "software.amazon.awssdk_identity-spi-2.54.17.jar": (
        "2919de075f4fc66a0aae12721e98f489a18bdcb340fc77aa592fca2027ac3834"
    ),
    "software.amazon.awssdk_json-utils-2.54.17.jar": (
        "b62027fa942806962802c4fa01f89a26ed5e6a54aade4ddbd5b8ef110c1938e5"
    ),
    "software.amazon.awssdk_metrics-spi-2.54.17.jar": (
        "7db7c26c858f809c4ec28a055bae927198473c902b566a7255f2a1ba3a8aef92"
    ),
    "software.amazon.awssdk_netty-nio-client-2.54.17.jar": (
        "4faaae2db7a602c2ae6241fc6c0fe9d55f0e46886c3713cd5d2fef2f677ea64a"
    ),
    "software.amazon.awssdk_profiles-2.54.17.jar": (
        "fb7fe665153ed20af07e302cd296a271c2b183659a90a8f011bb9933701da81d"
    ),
    "software.amazon.awssdk_protocol-core-2.54.17.jar": (
        "ebcfffe2ec348d028a84e4c9f918ba03c5b12907189f724a1a09c0270ef8f8c6"
    ),
    "software.amazon.awssdk_regions-2.54.17.jar": (
        "f45d1e32510d0aadd8072298ad207576dec507caa627c8b5f3f690ed8a2a4f7e"
    ),
    "software.amazon.awssdk_retries-2.54.17.jar": (
        "89a743b5f9cdd7fc32c406c3d7a25de7fb899ed68b5dc6d1a4a7ff6461caf8fb"
    ),
    "software.amazon.awssdk_retries-spi-2.54.17.jar": (
        "140c4ec460ab7c6b1aca606ddfd866223e7f5a1b143aa4bcc0a4261ce2af31c5"
    ),
    "software.amazon.awssdk_s3-2.54.17.jar": (
        "36f93b70181dbd91aa5efe2bf124c9b25e7359b13b281da0b2a4b82e83cc5b58"
    ),
    "software.amazon.awssdk_s3-transfer-manager-2.54.17.jar": (
        "7bef0ea4efd5e0860bab63e08317040951edb51b72a5be734284c28b8324ab87"
    ),
    "software.amazon.awssdk_sdk-core-2.54.17.jar": (
        "e359d931e304774f8053fa0b7e1268a0dab8d034ba20d4a82324d71805dff880"
    ),
    "software.amazon.awssdk_sts-2.54.17.jar": (
        "bae2e6c281792b09bc2e16c06c72216f944ca197d5f7f506c774b7c612fa17d1"
    ),
    "software.amazon.awssdk_third-party-jackson-core-2.54.17.jar": (
        "fb432be8d025865e3aa31af909c7d61fd69613dd3e2a992dc14fd8dbebd79ca0"
    ),
    "software.amazon.awssdk_utils-2.54.17.jar": (
        "8fd44e79dd8ef4c4115af13ce9f9453b7200a7cce949b79fb58ed8bbaf010dcd"
    ),
    "software.amazon.awssdk_utils-lite-2.54.17.jar": (
        "42e8a092447ce5b722dd55352515ec14fa62a73d829a16f1823469575782d33f"
    ),
    "software.amazon.eventstream_eventstream-1.0.1.jar": (
        "0c37d8e696117f02c302191b8110b0d0eb20fa412fce34c3a269ec73c16ce822"
    ),
}

#: Lines of the resolver that are shown when it fails.
_LAST = 15

Progress = Callable[[str], None]


def print_progress(text: str) -> None:
    """Progress for a person: one line on standard error."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201  # this is the module's command line


def _target(wanted: JarSet) -> Path:
    named = (*wanted.coordinates, *wanted.excluded)
    key = blake2b("\n".join(named).encode(), digest_size=6).hexdigest()
    return local_cache.folder() / "jars" / key


def kept(wanted: JarSet = TABLES) -> list[Path]:
    """The jar files that are in the cache; none before they were fetched."""
    return sorted(_target(wanted).glob("*.jar"))


def paths(progress: Progress = print_progress, wanted: JarSet = TABLES) -> list[Path]:
    """The jar files, fetched first if they are not in the cache yet (about 70 MB, for S3 14 MB).

    Raises `UnavailableError` when they cannot be fetched, after `progress` has had the resolver's last lines, and
    `CorruptError` for another jar than the pinned one.
    """
    target = _target(wanted)
    if not target.is_dir():
        with local_cache.exclusive(target):
            if not target.is_dir():
                _fetch(target, progress, wanted)
    return kept(wanted)


def _fetch(target: Path, progress: Progress, wanted: JarSet) -> None:
    progress(f"Spark: fetching {', '.join(wanted.coordinates)}")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".ivy-") as scratch:
        ivy = Path(scratch)
        nothing = ivy / "nothing.py"
        nothing.touch()
        log: list[str] = []
        for line in _resolve(ivy, nothing, wanted):
            log.append(line)
            if found := re.search(r"downloading .*/([^/\s]+\.jar)", line):
                progress(f"  {found[1]}")
        jars = sorted((ivy / "jars").glob("*.jar"))
        if not all(any(_artifact(each) in jar.name for jar in jars) for each in wanted.coordinates):
            for line in log[-_LAST:]:
                progress(f"  {line}")
            raise UnavailableError(
                "could not fetch Spark's jars",
                where=", ".join(wanted.coordinates),
                repair="check the network and Spark's repository settings; "
                f"`{Path(sys.executable).name} -m spark_consumers.spark.jars` tries again, and prints the resolver's lines",
            )
        # Spark's own class path comes first, so what it ships already would only be copied about.
        shipped = {_name(each.name) for each in (_spark_home() / "jars").glob("*.jar")}
        complete = ivy / "complete"
        complete.mkdir()
        for jar in jars:
            if _name(jar.name.partition("_")[2]) not in shipped:
                jar.rename(complete / jar.name)
        check(complete)
        complete.rename(target)


def check(folder: Path) -> None:
    """Raise `CorruptError` if the folder holds another jar than those that are pinned."""
    found = {jar.name: sha256(jar.read_bytes()).hexdigest() for jar in folder.glob("*.jar")}
    for name, digest in sorted(found.items()):
        if SHA256.get(name) != digest:
            raise CorruptError(
                f"{name} has SHA-256 {digest}, not {SHA256.get(name, 'that of any pinned jar')}",
                where=", ".join(COORDINATES),
                repair="check which repository Spark is configured to use, and what it serves",
            )


def _artifact(coordinate: str) -> str:
    group, name, version = coordinate.split(":")
    return f"{group}_{name}-{version}"


def _name(jar: str) -> str:
    """`delta-storage` of `delta-storage-4.4.0.jar`."""
    return re.split(r"-(?=\d)", jar, maxsplit=1)[0]


def _spark_home() -> Path:
    import pyspark

    return Path(pyspark.__file__).parent


def _resolve(ivy: Path, script: Path, wanted: JarSet) -> Iterator[str]:
    """Run Spark's resolver into `ivy`; yields its lines. `script` is the empty program that it starts."""
    home = _spark_home()
    command = [
        str(home / "bin" / "spark-submit"),
        *("--master", "local[1]"),
        *("--packages", ",".join(wanted.coordinates)),
        *(("--exclude-packages", ",".join(wanted.excluded)) if wanted.excluded else ()),
        *("--conf", f"spark.jars.ivy={ivy}"),
        str(script),
    ]
    environment = os.environ | {
        "JAVA_HOME": str(java.find().home),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield line.rstrip()


def main() -> None:
    """Fetch the jars and print their paths; with the argument `s3` those for S3, too."""
    for jar in (
        jar for wanted in (TABLES, S3)[: 1 + ("s3" in sys.argv[1:])] for jar in paths(wanted=wanted)
    ):
        print(jar)  # noqa: T201  # the command's result


if __name__ == "__main__":
    main()
