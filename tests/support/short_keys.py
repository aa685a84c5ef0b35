"""Keys of S3 that live for seconds, as a role of a machine or a container gives them: a service that issues them, and who has expired."""

import hashlib
import hmac
import json
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.http_service import served
from tests.support.s3 import KEYS


class ShortKeys:
    """A service of credentials as a container has it (`AWS_CONTAINER_CREDENTIALS_FULL_URI`). Keys live for `life` seconds.

    All have the keys of the tests' server and a session token each, which `accepts` checks; the server knows no tokens, so requests are
    signed again without (`signed`). `answers`: whether the service gives any.
    """

    def __init__(self, folder: Path, life: float) -> None:
        self.life = life
        self.answers = True
        #: By session token: when it ends, in monotonic seconds.
        self._ends: dict[str, float] = {}
        #: The tokens of requests that were accepted.
        self.used: set[str] = set()
        self._lock = threading.Lock()
        self._secret = uuid.uuid4().hex
        self._file = folder / "authorization"
        self._file.write_text(self._secret)
        keys = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                known = self.headers.get("Authorization") == keys._secret
                status = 200 if known and keys.answers else 500 if known else 403
                content = json.dumps(keys._issued()).encode() if status == 200 else b"{}"
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @contextmanager
    def running(self) -> Iterator["ShortKeys"]:
        """Answers for the block."""
        with served(self._server):
            yield self
        self._server.server_close()

    def environment(self) -> dict[str, str]:
        """What a process without other keys needs to get these."""
        return {
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://127.0.0.1:{self._server.server_port}/keys",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(self._file),
        }

    def accepts(self, headers: Mapping[str, str]) -> bool:
        """Whether a request of S3 has keys that have not expired."""
        found = {name.lower(): value for name, value in headers.items()}
        token = found.get("x-amz-security-token", "")
        with self._lock:
            if self._ends.get(token, float("-inf")) < time.monotonic():
                return False
            self.used.add(token)
            return True

    def in_environment(self) -> dict[str, str]:
        """Keys that a process has in its environment, where nobody renews them."""
        issued = self._issued()
        return {
            "AWS_ACCESS_KEY_ID": issued["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": issued["SecretAccessKey"],
            "AWS_SESSION_TOKEN": issued["Token"],
        }

    def expire(self) -> None:
        """End all keys now."""
        with self._lock:
            self._ends.clear()

    def _issued(self) -> dict[str, str]:
        token = uuid.uuid4().hex
        with self._lock:
            self._ends[token] = time.monotonic() + self.life
        end = datetime.fromtimestamp(time.time() + self.life, UTC)
        return {
            "AccessKeyId": KEYS["AWS_ACCESS_KEY_ID"],
            "SecretAccessKey": KEYS["AWS_SECRET_ACCESS_KEY"],
            "Token": token,
            "Expiration": end.isoformat(timespec="seconds").replace("+00:00", "Z"),
        }


def signed(
    method: str, path: str, headers: Mapping[str, str], body: bytes
) -> tuple[dict[str, str], bytes]:
    """Headers and content of a request with a session token as one without (AWS Signature Version 4)."""
    kept = {name.lower(): value for name, value in headers.items()}
    if kept.get("x-amz-content-sha256", "").startswith("STREAMING-"):
        body = b"".join(_chunks(body))
        for name in ("x-amz-decoded-content-length", "x-amz-trailer", "content-encoding"):
            kept.pop(name, None)
    for name in ("authorization", "x-amz-security-token"):
        kept.pop(name, None)
    kept["content-length"] = str(len(body))
    kept["x-amz-content-sha256"] = hashlib.sha256(body).hexdigest()
    names = sorted(name for name in kept if name == "host" or name.startswith("x-amz-"))
    uri, _, query = path.partition("?")
    pairs = sorted(part if "=" in part else f"{part}=" for part in query.split("&") if part)
    asked = [method, uri, "&".join(pairs), *(f"{name}:{kept[name].strip()}" for name in names)]
    asked += ["", ";".join(names), kept["x-amz-content-sha256"]]
    date = kept["x-amz-date"]
    region = _region(headers)
    scope = f"{date[:8]}/{region}/s3/aws4_request"
    text = "\n".join(
        ["AWS4-HMAC-SHA256", date, scope, hashlib.sha256("\n".join(asked).encode()).hexdigest()]
    )
    key = f"AWS4{KEYS['AWS_SECRET_ACCESS_KEY']}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    kept["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={KEYS['AWS_ACCESS_KEY_ID']}/{scope}, "
        f"SignedHeaders={';'.join(names)}, Signature={signature}"
    )
    return kept, body


def _region(headers: Mapping[str, str]) -> str:
    """The region that the request was signed for."""
    found = next(value for name, value in headers.items() if name.lower() == "authorization")
    return found.partition("Credential=")[2].split("/")[2]


def _chunks(body: bytes) -> Iterator[bytes]:
    """The chunks of a content that was sent as `aws-chunked`."""
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end].partition(b";")[0], 16)
        if size == 0:
            return
        yield body[end + 2 : end + 2 + size]
        at = end + 2 + size + 2
