"""The REST catalog of a demo's lake: one that the user has, named by the environment."""

import json
import os
import uuid
from typing import Final
from urllib.parse import urlsplit

from walsender_bridge.demo import bucket
from walsender_bridge.errors import UsageError

#: The variables with the catalog's address and its warehouse. Its secrets are in the variables that the lake reads.
URI, WAREHOUSE = "TUSKLINE_CATALOG_URI", "TUSKLINE_CATALOG_WAREHOUSE"
KINDS: Final = ("folder", "rest")


def section(kind: str, lake: str) -> list[str]:
    """The lines of `[lake.catalog]`, in a namespace of this demo's own; none for tables in a folder. `lake`: `--lake`.

    Raises `UsageError`, also for a bucket that the catalog cannot know.
    """
    if kind not in KINDS:
        raise UsageError(f"unknown catalog {kind!r}", repair=f"use one of {', '.join(KINDS)}")
    if kind == "folder":
        return []
    uri = os.environ.get(URI, "")
    if not uri:
        raise UsageError(
            "no REST catalog is named",
            where=URI,
            repair=f"set {URI} to the address of a catalog, up to /v1, and {WAREHOUSE} to its warehouse; a warehouse on this "
            "machine's disk must contain the demo's folder (--dir)",
        )
    if lake == bucket.S3 and bucket.named_port() is None:
        raise UsageError(
            "the catalog does not know the bucket that this demo makes",
            where=bucket.PORT,
            repair=f"configure the catalog for {bucket.CATALOG_NEEDS}, and set {bucket.PORT} to that port; "
            "or specify a bucket that it has: --lake s3://bucket/prefix",
        )
    lines = {"type": "rest", "uri": uri, "namespace": f"tuskline_demo_{uuid.uuid4().hex[:8]}"}
    if warehouse := os.environ.get(WAREHOUSE):
        lines["warehouse"] = warehouse
    made = [f"{name} = {json.dumps(value)}" for name, value in lines.items()]
    # What stays on this machine needs no TLS.
    if urlsplit(uri).hostname in {"127.0.0.1", "::1", "localhost"}:
        made.append("allow_http = true")
    return ["", "[lake.catalog]", *made]
