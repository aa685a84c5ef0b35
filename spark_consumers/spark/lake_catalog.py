"""The record of a lake whose tables are in an Iceberg REST catalog: which catalog that is, and how Spark reaches it.

The lake's driver writes it (`<lake>/_tuskline/catalog.json`), so who reads the lake needs no more than the lake's root. It has no
secret: a token or a client's credential comes from the environment of each process, or from a file.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from spark_consumers.spark import buckets
from walsender_bridge.errors import CorruptError

#: The record's name below the lake's root.
RECORD = "_tuskline/catalog.json"
#: The variables with a token, or with `id:secret` of a client (OAuth 2).
TOKEN, CREDENTIAL = "TUSKLINE_CATALOG_TOKEN", "TUSKLINE_CATALOG_CREDENTIAL"  # names
#: Settings whose names match are not shown in Spark's UI: Spark's own expression, and clients' credentials.
_REDACTED = "(?i)secret|password|token|access[.]?key|credential"


@dataclass(frozen=True, slots=True)
class LakeCatalog:
    """A REST catalog: its address up to `/v1`, its warehouse, and the namespace that those of the lake's tables are in.

    `oauth2_uri`: where tokens come from, if not from the catalog. `token_file`: a file with a bearer token. `ca`: a file with the
    certificate authority of its server. `allow_http`: its address may be http.
    """

    uri: str
    warehouse: str = ""
    namespace: tuple[str, ...] = ("tuskline",)
    oauth2_uri: str = ""
    scope: str = "catalog"
    token_file: str = ""
    ca: str = ""
    allow_http: bool = False

    @classmethod
    def parse(cls, content: bytes, where: str) -> Self:
        """The catalog in a record's content; `where` names the record. Raises `CorruptError`."""
        try:
            record = json.loads(content)
            known = {each.name: record[each.name] for each in fields(cls) if each.name in record}
            return cls(**{**known, "namespace": tuple(record["namespace"])})
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptError(
                f"the record of the lake's catalog cannot be read: {error}",
                where=where,
                repair="remove it, and start `tuskline lake run`, which writes it again",
            ) from None

    def dump(self) -> bytes:
        """The record's content."""
        return json.dumps(asdict(self)).encode()

    def is_same_place(self, other: "LakeCatalog") -> bool:
        """Whether tables are in the same place of what may be the same server at another address."""
        return (self.warehouse, self.namespace) == (other.warehouse, other.namespace)


def of_lake_at(
    lake: str | Path, endpoint: str | None = None, region: str | None = None
) -> LakeCatalog | None:
    """The catalog of the lake in this folder or bucket, by its record; None if its tables are in there, or there is no lake.

    Raises `CorruptError`, and `UnavailableError` or `UsageError` for a bucket that cannot be read.
    """
    text = os.fspath(lake)
    if buckets.is_bucket(text):
        content = buckets.read(text, RECORD, endpoint, region)
        where = f"{text.rstrip('/')}/{RECORD}"
        return None if content is None else LakeCatalog.parse(content, where)
    if "://" in text and not text.startswith("file://"):
        return None
    file = Path(text.removeprefix("file://"), RECORD)
    try:
        return LakeCatalog.parse(file.read_bytes(), str(file))
    except (FileNotFoundError, NotADirectoryError):
        return None


def spark_settings(found: LakeCatalog, name: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The settings that make this catalog the Spark catalog of that name. A token is as it is now: Spark does not renew it."""
    catalog = f"spark.sql.catalog.{name}"
    settings = {
        catalog: "org.apache.iceberg.spark.SparkCatalog",
        f"{catalog}.type": "rest",
        f"{catalog}.uri": found.uri,
        f"{catalog}.warehouse": found.warehouse,
        f"{catalog}.cache-enabled": "false",
        f"{catalog}.header.X-Iceberg-Access-Delegation": "vended-credentials",
        f"{catalog}.oauth2-server-uri": found.oauth2_uri,
    }
    if token := _token(found, environment):
        settings[f"{catalog}.token"] = token
    elif credential := environment.get(CREDENTIAL):
        settings |= {f"{catalog}.credential": credential, f"{catalog}.scope": found.scope}
    return {key: value for key, value in settings.items() if value}


def is_secret(key: str) -> bool:
    """Whether this setting is one that processes have of their own, and that is not shown."""
    return key.endswith((".token", ".credential"))


def redaction(settings: Iterable[str]) -> dict[str, str]:
    """The setting by which Spark's UI does not show the secrets among these, which are given when its JVM starts."""
    return {"spark.redaction.regex": _REDACTED} if any(map(is_secret, settings)) else {}


def _token(found: LakeCatalog, environment: Mapping[str, str]) -> str:
    if found.token_file and os.access(found.token_file, os.R_OK):
        return Path(found.token_file).read_text().strip()
    return environment.get(TOKEN, "")
