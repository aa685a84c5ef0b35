"""A small Iceberg REST catalog for tests: tables of version 3, commits of several tables, and faults on request.

It keeps metadata in memory, and makes commits by the functions of the folder's catalog, whose results `tests/spark` compares
with those of Iceberg's own library. Everything happens under one lock, so a commit of several tables is atomic. Of tables
at a `file://` location, or in a bucket whose keys it has, it also writes the metadata files, so engines read them.
"""

import json
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

from spark_consumers.lake.catalog.requirements import unmet
from spark_consumers.lake.catalog.rest_http import RestOptions
from spark_consumers.lake.catalog.updates import applied, created
from spark_consumers.lake.format.checked import manifests_of
from spark_consumers.lake.store.place import ObjectPlace, place
from tests.support.http_service import served

CLIENT, SECRET = "tuskline", "a-secret-of-tests"
#: What FileIO gets with each table.
VENDED = {"s3.access-key-id": "of-this-table"}
_TRANSACTIONS = "POST /v1/{prefix}/transactions/commit"
#: Between the parts of a namespace in a query, and here.
_SEP = "\x1f"
#: What every server of the specification's first version has.
_ENDPOINTS = [
    "GET /v1/{prefix}/namespaces",
    "GET /v1/{prefix}/namespaces/{namespace}",
    "POST /v1/{prefix}/namespaces",
    "GET /v1/{prefix}/namespaces/{namespace}/tables",
    "POST /v1/{prefix}/namespaces/{namespace}/tables",
    "GET /v1/{prefix}/namespaces/{namespace}/tables/{table}",
    "POST /v1/{prefix}/namespaces/{namespace}/tables/{table}",
    "DELETE /v1/{prefix}/namespaces/{namespace}/tables/{table}",
    "POST /v1/{prefix}/tables/rename",
]


class RestServer:
    """The server's state.

    `faults`: what happens to the next changes, one each: `500 after`, `503 after` and `dropped after` the work was done, `500 before`
    it, `501 before`, `406 before` and `405 before` as from a server that lacks the operation, `twice` (a proxy repeats it), `delayed` (it is carried out when `arrive` is called, and has no answer).
    `delay`: seconds that a request takes, by its method; it is carried out, and then the answer waits.
    """

    def __init__(self, *, v3: bool = True, multi_table: bool = True, branches: bool = True) -> None:
        self.v3 = v3
        self.multi_table = multi_table
        #: Without them a table keeps `main` and its newest snapshot, as in Nessie.
        self.branches = branches
        self.tables: dict[tuple[str, ...], dict[str, Any]] = {}
        #: The metadata file of each table.
        self.files: dict[tuple[str, ...], str] = {}
        self.namespaces: set[tuple[str, ...]] = set()
        self.faults: deque[str] = deque()
        self.requests: list[str] = []
        self.tokens: set[str] = set()
        #: Called with method and path before each request is carried out.
        self.seen: Callable[[str, str], None] = lambda _method, _path: None
        #: Whether it has the request that creates a table.
        self.creates = True
        #: Whether it closes connections without an answer.
        self.down = False
        #: Whether requests need a token.
        self.guarded = False
        #: Seconds for which a token is said to live.
        self.life = 3600
        #: The type of the requirements that it does not look at.
        self.ignored = ""
        #: Whether a change of a table that has changed since the request began is left out, as by Iceberg's own server.
        self.leaves_out = False
        #: What it takes no path with; some servers no encoded `%`.
        self.refused = ""
        #: What is between the parts of a namespace in a path, encoded.
        self.separator = "%1F"
        #: The settings that FileIO gets with each table in a bucket in which this server writes; None: it writes in none.
        self.keys: dict[str, str] | None = None
        self.delay: Callable[[str], float] = lambda _method: 0.0
        self.lock = threading.RLock()
        self._late: list[tuple[str, str, Any]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.uri = f"http://127.0.0.1:{self._server.server_port}/catalog"

    @contextmanager
    def running(self) -> Iterator["RestServer"]:
        with served(self._server):
            yield self
        self._server.server_close()

    def options(self, **more: Any) -> RestOptions:
        return RestOptions(self.uri, allow_http=True, **more)

    def arrive(self) -> list[int]:
        """Carry the delayed requests out; the status that each got."""
        late, self._late = self._late, []
        return [self.answer(method, path, body)[0] for method, path, body in late]

    def assert_no_stray_manifest(self, *names: tuple[str, ...]) -> None:
        """Every manifest list and manifest on disk is of a snapshot that the catalog has; of all tables, or of these."""
        for metadata in [self.tables[name] for name in names or self.tables]:
            lists = {place(each["manifest-list"]) for each in metadata["snapshots"]}
            wanted = lists | {each for one in lists for each in manifests_of(one)}
            folder = place(metadata["location"]) / "metadata"
            assert set(folder.glob("*.avro")) == wanted, folder

    # -- requests -----------------------------------------------------------------------------------

    def answer(
        self, method: str, path: str, body: Any, query: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        query = query or {}
        with self.lock:
            if self.refused and self.refused in path:
                return 400, {"message": "Ambiguous URI", "status": "400"}
            match method, self._parts(path):
                case "GET", ["v1", "config"]:
                    endpoints = _ENDPOINTS + ([_TRANSACTIONS] if self.multi_table else [])
                    return 200, {
                        "defaults": {},
                        "overrides": {"prefix": "lakes", "namespace-separator": self.separator},
                        "endpoints": endpoints,
                    }
                case "POST", ["v1", "lakes", "namespaces"]:
                    return self._create_namespace(tuple(body["namespace"]))
                case "GET", ["v1", "lakes", "namespaces"]:
                    return self._namespaces(
                        tuple(filter(None, query.get("parent", "").split(_SEP)))
                    )
                case (("GET" | "HEAD"), ["v1", "lakes", "namespaces", space]):
                    found = tuple(space.split(_SEP)) in self.namespaces
                    return (200 if found else 404), {
                        "namespace": space.split(_SEP),
                        "properties": {},
                    }
                case "GET", ["v1", "lakes", "namespaces", space, "tables"]:
                    return self._list(tuple(space.split(_SEP)))
                case "POST", ["v1", "lakes", "tables", "rename"]:
                    return self._rename(body)
                case "POST", ["v1", "lakes", "namespaces", space, "tables"]:
                    return self._create(tuple(space.split(_SEP)), body)
                case "POST", ["v1", "lakes", "transactions", "commit"] if self.multi_table:
                    return self._commit(body["table-changes"])
                case method, ["v1", "lakes", "namespaces", space, "tables", name]:
                    return self._of_table(method, (*space.split(_SEP), name), body)
        return 404, _error(f"no such path: {path}")

    def _parts(self, path: str) -> list[str]:
        """The parts of a path, those of a namespace in it separated by `_SEP`."""
        parts = path.strip("/").split("/")
        return [_SEP.join(map(unquote, part.split(self.separator))) for part in parts]

    def _create_namespace(self, name: tuple[str, ...]) -> tuple[int, dict[str, Any]]:
        if name in self.namespaces:
            return 409, _error("the namespace exists")
        if len(name) > 1 and name[:-1] not in self.namespaces:
            return 404, _error("its parent does not exist")
        self.namespaces.add(name)
        return 200, {"namespace": list(name)}

    def _create(self, space: tuple[str, ...], body: Any) -> tuple[int, dict[str, Any]]:
        name = (*space, body["name"])
        if not self.creates:
            return 406, _error("tables are not created")
        if space not in self.namespaces:
            return 404, _error("no such namespace")
        if name in self.tables:
            return 409, _error("the table exists")
        version = int(body["properties"]["format-version"])
        if version > 2 and not self.v3:
            return 400, _error("version 3 is not supported")
        location = body.get("location") or f"s3://lakes/{'/'.join(name)}"
        made = created(str(uuid.uuid4()), location, body["schema"], body["properties"], _now())
        self._keep(name, made)
        return 200, self._loaded(name)

    def _namespaces(self, parent: tuple[str, ...]) -> tuple[int, dict[str, Any]]:
        depth = len(parent) + 1
        found = [n for n in sorted(self.namespaces) if n[:-1] == parent and len(n) == depth]
        return 200, {"namespaces": [list(name) for name in found]}

    def _list(self, space: tuple[str, ...]) -> tuple[int, dict[str, Any]]:
        if space not in self.namespaces:
            return 404, _error("no such namespace")
        found = [name for name in sorted(self.tables) if name[:-1] == space]
        return 200, {"identifiers": [{"namespace": list(space), "name": n[-1]} for n in found]}

    def _rename(self, body: Any) -> tuple[int, dict[str, Any]]:
        old, new = (
            (*body[each]["namespace"], body[each]["name"]) for each in ("source", "destination")
        )
        if old not in self.tables:
            return 404, _error("no such table")
        if new in self.tables:
            return 409, _error("the table exists")
        self.tables[new] = self.tables.pop(old)
        self.files[new] = self.files.pop(old)
        return 204, {}

    def _keep(self, name: tuple[str, ...], metadata: dict[str, Any]) -> None:
        """Make this the table's metadata, in a file of its own."""
        if not self.branches:
            refs = metadata.get("refs", {})
            metadata["refs"] = {n: ref for n, ref in refs.items() if n == "main"}
            main = metadata["refs"].get("main", {}).get("snapshot-id")
            metadata["snapshots"] = [s for s in metadata["snapshots"] if s["snapshot-id"] == main]
        location = metadata["location"]
        number = len(metadata["metadata-log"])
        file = f"{location}/metadata/{number:05d}-{uuid.uuid4()}.metadata.json"
        at = place(file)
        if not isinstance(at, ObjectPlace):
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_text(json.dumps(metadata))
        elif self.keys is not None:
            at.replace_by(json.dumps(metadata).encode())
        self.tables[name], self.files[name] = metadata, file

    def _of_table(
        self, method: str, name: tuple[str, ...], body: Any
    ) -> tuple[int, dict[str, Any]]:
        if name not in self.tables:
            return 404, _error("no such table")
        if method in {"GET", "HEAD"}:
            return 200, self._loaded(name)
        if method == "DELETE":
            del self.tables[name], self.files[name]
            return 204, {}
        # Iceberg's own client leaves out what the path has.
        identifier = {"namespace": list(name[:-1]), "name": name[-1]}
        return self._commit([{"identifier": identifier, **body}])

    def _commit(self, changes: Any) -> tuple[int, dict[str, Any]]:
        made: dict[tuple[str, ...], Any] = {}
        for change in changes:
            name = (*change["identifier"]["namespace"], change["identifier"]["name"])
            if name not in self.tables:
                return 404, _error("no such table")
            if name in made and self.leaves_out:
                continue
            metadata = made.get(name, self.tables[name])
            looked_at = [r for r in change["requirements"] if r["type"] != self.ignored]
            required = unmet(metadata, looked_at)
            if required is not None:
                return 409, _error(f"requirement failed: {required}")
            made[name] = applied(metadata, change["updates"], _now(), self.files[name])
        for name, metadata in made.items():
            self._keep(name, metadata)
        return 200, self._loaded(name)

    def _loaded(self, name: tuple[str, ...]) -> dict[str, Any]:
        metadata = self.tables[name]
        location = metadata["location"]
        if self.keys is not None:
            own = {"prefix": location, "config": self.keys}
            return {
                "metadata-location": self.files[name],
                "metadata": metadata,
                "storage-credentials": [own],
            }
        return {
            "metadata-location": self.files[name],
            "metadata": metadata,
            "config": {"s3.region": "here"},
            "storage-credentials": []
            if location.startswith("file://")
            else [
                {"prefix": "s3://lakes", "config": {"s3.access-key-id": "of-all-tables"}},
                {"prefix": location, "config": VENDED},
                {"prefix": "s3://lakes/others", "config": {"s3.access-key-id": "of-others"}},
            ],
        }

    def _grant(self, form: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        if (form.get("client_id"), form.get("client_secret")) != ([CLIENT], [SECRET]):
            return 401, {"error": "invalid_client"}
        token = uuid.uuid4().hex
        self.tokens.add(token)
        return 200, {"access_token": token, "token_type": "bearer", "expires_in": self.life}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

            def do_GET(self) -> None:
                self._serve("GET")

            def do_HEAD(self) -> None:
                self._serve("HEAD")

            def do_DELETE(self) -> None:
                self._serve("DELETE")

            def do_POST(self) -> None:
                self._serve("POST")

            def _serve(self, method: str) -> None:
                parts = urlsplit(self.path)
                path, query = parts.path.removeprefix("/catalog"), dict(parse_qsl(parts.query))
                content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if server.down:
                    self.close_connection = True
                    return
                server.requests.append(f"{method} {path}")
                server.seen(method, path)
                if path == "/v1/oauth/tokens":
                    self._say(*server._grant(parse_qs(content.decode())))
                    return
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                if server.guarded and token not in server.tokens:
                    self._say(401, _error("the token is not valid"))
                    return
                body = json.loads(content) if content else None
                fault = server.faults.popleft() if method == "POST" and server.faults else ""
                if fault == "delayed":
                    server._late.append((method, path, body))
                if fault == "delayed":
                    fault = "500 before"
                if fault.endswith(" before"):
                    self._say(int(fault.removesuffix(" before")), _error("out of order"))
                    return
                if fault == "twice":
                    server.answer(method, path, body)
                answer = server.answer(method, path, body, query)
                time.sleep(server.delay(method))
                if fault == "dropped after":
                    self.close_connection = True
                    return
                if fault.endswith(" after"):
                    answer = int(fault.removesuffix(" after")), _error("out of order")
                self._say(*answer)

            def _say(self, status: int, body: dict[str, Any]) -> None:
                content = json.dumps(body).encode() if status != 204 else b""
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                with suppress(OSError):
                    self.wfile.write(content if self.command != "HEAD" else b"")

        return Handler


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "OfTests", "code": 0}}


def _now() -> int:
    return time.time_ns() // 1_000_000
