"""A server of S3 for tests: versitygw, built from the Go module proxy once, or moto where there is no Go.

versitygw checks signatures and conditions as S3 does. moto checks no signatures. `FaultProxy` stands before either and
loses, delays, doubles and falsifies what a test names.
"""

import contextlib
import http.client
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from spark_consumers.lake.store.lake_store import StoreOptions
from spark_consumers.lake.store.object_store import ObjectStore
from tests.support.http_service import served
from tests.support.waiting import wait_for
from walsender_bridge.demo.bucket import metadata_options
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.runtime import cache

VERSION: Final = "v1.8.0"
BUCKET: Final = "lakes"
KEYS: Final = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "a-secret-of-tests"}


def gateway() -> Path | None:
    """versitygw, built if need be: minutes the first time. None where it cannot be."""
    folder = _folder()
    program, go = folder / "versitygw", shutil.which("go")
    if program.exists() or go is None:
        return program if program.exists() else None
    with cache.exclusive(folder):
        if not program.exists():
            draft = folder.with_name(f".{folder.name}")
            built = subprocess.run(
                [go, "install", f"github.com/versity/versitygw/cmd/versitygw@{VERSION}"],
                env={**os.environ, "GOBIN": str(draft)},
                capture_output=True,
                check=False,
            )
            if built.returncode != 0:
                return None
            folder.mkdir(exist_ok=True)
            (draft / "versitygw").rename(program)
    return program


def described() -> str:
    """What this machine has for these tests."""
    if (_folder() / "versitygw").exists():
        return f"versitygw {VERSION}"
    if shutil.which("go") is not None:
        return f"versitygw {VERSION}, built with Go when it is needed"
    return "moto" if find_spec("moto") is not None else "not here: install Go, or moto[server]"


def _folder() -> Path:
    return cache.folder() / "go" / f"versitygw-{VERSION}"


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[int]:
    """A server with one bucket, its data in `folder`; its port. Skips where there is neither."""
    port, program = free_port(), gateway()
    data = folder / "s3"
    (data / BUCKET).mkdir(parents=True)
    if program is not None:
        command = [
            str(program),
            "--port",
            f"127.0.0.1:{port}",
            "posix",
            *metadata_options(folder),
            str(data),
        ]
    elif find_spec("moto") is not None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    else:
        pytest.skip("a server of S3 needs Go (to build versitygw), or moto[server]")
    env = {**os.environ, "ROOT_ACCESS_KEY": KEYS["AWS_ACCESS_KEY_ID"]}
    env |= {"ROOT_SECRET_KEY": KEYS["AWS_SECRET_ACCESS_KEY"]}
    with (folder / "s3.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    try:
        wait_for(lambda: _status(port, "GET", "/"), 60, "the server of S3 answers")
        if program is None:
            assert _status(port, "PUT", f"/{BUCKET}") == 200
        yield port
    finally:
        process.kill()
        process.wait()


def _status(port: int, method: str, path: str) -> int:
    """The status of an answer; 0 if there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def options_at(port: int) -> StoreOptions:
    """How the tests' bucket is reached by this port."""
    return StoreOptions(f"http://127.0.0.1:{port}", "us-east-1", allow_http=True)


def store_at(
    port: int, prefix: str, *, answer: float = 10.0, outcome: float = 30.0, bucket: str = BUCKET
) -> ObjectStore:
    """The records below a prefix of the tests' bucket. The environment has to have the keys."""
    return ObjectStore.at(
        f"s3://{bucket}/{prefix}", options_at(port), answer=answer, outcome=outcome
    )


@pytest.fixture(scope="session")
def s3_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server of S3 with the bucket of the tests."""
    with s3_server(tmp_path_factory.mktemp("s3")) as port:
        yield port


@pytest.fixture
def s3_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment has the keys."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


_REFUSALS: Final = {
    "absent": (404, "NoSuchKey"),
    "expired": (400, "ExpiredToken"),
    "skewed": (403, "RequestTimeTooSkewed"),
}


Signed = Callable[[str, str, dict[str, str], bytes], tuple[dict[str, str], bytes]]


class FaultProxy:
    """Passes requests on to the server at `port`; what `faults` says happens to the next PUTs, one each, in order.

    `500`, `503`: the answer, after the server did the work; `drop`: the connection, after it; `hang`: no answer for `hang`
    seconds, after it; `lost`: the connection, before it; `twice`: the work is done twice, and the second answer given; `late`:
    the connection is dropped, and the work done when `arrive` is called.

    `choose` gets the kind (`LIST`, or the method) and the path of each request that `faults` says nothing of, and names one of these,
    or: `cut`: half of the content of the answer arrives; `slow`: passed on after `hang` seconds; `absent`, `expired`, `skewed`: refused
    without a look.
    """

    def __init__(self, port: int, hang: float = 3.0) -> None:
        self.faults: list[str] = []
        self.choose: Callable[[str, str], str] = lambda _kind, _path: ""
        #: Whether the keys that a request's headers show are valid; otherwise it is refused as `expired`.
        self.accepts: Callable[[Mapping[str, str]], bool] = lambda _headers: True
        #: Headers and content that are passed on, of method, path, headers and content.
        self.signed: Signed = lambda _method, _path, headers, body: (headers, body)
        self.requests: Counter[str] = Counter()
        #: Called with method and path before each request is passed on.
        self.seen: Callable[[str, str], None] = lambda _method, _path: None
        self._to = port
        self._hang = hang
        self._late: list[tuple[str, str, dict[str, str], bytes]] = []
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def handle_all(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                proxy.handle(self, body)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_all  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]

    @contextlib.contextmanager
    def running(self) -> Iterator["FaultProxy"]:
        """Runs for the block."""
        with served(self._server):
            yield self
        self._server.server_close()

    def handle(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        self.seen(request.command, request.path)
        kind = "LIST" if "list-type" in request.path else request.command
        headers = dict(request.headers.items())
        with self._lock:
            self.requests[kind] += 1
            fault = self.faults.pop(0) if request.command == "PUT" and self.faults else ""
            fault = fault or self.choose(kind, request.path)
        if not self.accepts(headers):
            fault = "expired"
        asked = request.command, request.path, headers, body
        if fault == "late":
            self._late.append(asked)
        if fault in {"lost", "late"}:
            self._drop(request)
            return
        if fault in _REFUSALS:
            status, code = _REFUSALS[fault]
            self._answer(request, status, {}, f"<Error><Code>{code}</Code></Error>".encode())
            return
        if fault == "slow":
            time.sleep(self._hang)
        for _ in range(2 if fault == "twice" else 1):
            status, answered, content = self._pass_on(*asked)
        if fault == "drop":
            self._drop(request)
        elif fault == "hang":
            time.sleep(self._hang)
            self._drop(request)
        elif fault == "cut":
            self._answer(request, status, answered, content, sent=len(content) // 2)
            self._drop(request)
        elif fault in {"500", "503"}:
            code = "InternalError" if fault == "500" else "SlowDown"
            content = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()
            self._answer(request, int(fault), {"Content-Type": "application/xml"}, content)
        else:
            self._answer(request, status, answered, content)

    def arrive(self) -> list[int]:
        """The late requests arrive now; the statuses of their answers."""
        late, self._late = self._late, []
        return [self._pass_on(*asked)[0] for asked in late]

    def _pass_on(
        self, command: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        headers, body = self.signed(command, path, headers, body)
        connection = http.client.HTTPConnection("127.0.0.1", self._to, timeout=30)
        try:
            connection.putrequest(command, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    @staticmethod
    def _drop(request: BaseHTTPRequestHandler) -> None:
        request.close_connection = True

    @staticmethod
    def _answer(
        request: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        body: bytes,
        sent: int | None = None,
    ) -> None:
        request.send_response_only(status)
        kept = {name.lower(): value for name, value in headers.items()}
        for name in ("connection", "keep-alive", "transfer-encoding"):
            kept.pop(name, None)
        if request.command != "HEAD":
            kept["content-length"] = str(len(body))
        for name, value in kept.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body[:sent])
