"""A client of etcd (3.4 and later), by the JSON over HTTP that every member of it serves.

A call goes to one member, and on to the next one if that member does not answer, or has no quorum. All calls here
may be repeated (`leadership.py`, W2). Keys and values are encoded here; the requests are those of etcd's own API.
"""

import base64
import http.client
import json
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from walsender_bridge.errors import (
    DiskFullError,
    NotSupportedError,
    TusklineError,
    UnavailableError,
)
from walsender_bridge.runtime import secret_file
from walsender_bridge.runtime.closing import Closing
from walsender_bridge.runtime.tls_files import TlsFiles

if TYPE_CHECKING:
    from walsender_bridge.config import EtcdSection

#: Codes of gRPC in etcd's errors.
_RESOURCE_EXHAUSTED: Final = 8
#: Those that another member, or a later attempt, may not have: canceled, unknown, deadline exceeded, unavailable.
_UNKNOWN: Final = 2
_PASSING: Final = frozenset({1, _UNKNOWN, 4, 14})
#: Keys in one answer.
_PAGE: Final = 32
#: Bytes of an answer: a page of the largest values that etcd takes by default (1.5 MiB), as base64.
_MOST_BYTES: Final = 128 << 20


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """`endpoints`: `host:port` of each member. `tls`: certificate for etcd, and its authority; None: no TLS."""

    endpoints: tuple[str, ...]
    prefix: str = "/tuskline/"
    lease: float = 5.0
    tls: TlsFiles | None = None

    @classmethod
    def of(cls, section: "EtcdSection") -> Self:
        """The configured cluster."""
        return cls(section.endpoints, section.prefix, section.lease, section.tls_files)


class Etcd(Closing):
    """See the module. `attempt`: seconds for a member to answer. Threads may share it; they wait for each other.

    Raises `ConfigError` for a key that other accounts can read.
    """

    def __init__(self, settings: EtcdSettings, attempt: float) -> None:
        if settings.tls is not None:
            secret_file.check_key(settings.tls.key)
        self._settings = settings
        self._attempt = attempt
        self._lock = threading.Lock()
        self._member = 0
        self._connection: http.client.HTTPConnection | None = None
        self.where = "etcd at " + ", ".join(settings.endpoints)

    def call(self, path: str, request: Mapping[str, Any], *, within: float) -> dict[str, Any]:
        """The answer of a method such as `kv/range`.

        Raises `UnavailableError` if no member answers for `within` seconds, `DiskFullError`, `NotSupportedError`, and
        `TusklineError` for what etcd refuses.
        """
        deadline = time.monotonic() + within
        body = json.dumps(request)
        while True:
            for _ in self._settings.endpoints:
                with self._lock:
                    try:
                        return self._ask(path, body)
                    except (OSError, http.client.HTTPException, ValueError) as error:
                        unreachable = self._unreachable(error)
                        self._next_member()
                if time.monotonic() >= deadline:
                    raise unreachable
            time.sleep(min(0.1, max(0.0, deadline - time.monotonic())))

    def _unreachable(self, error: Exception) -> UnavailableError:
        repair = "check that a majority of its members runs: `etcdctl endpoint health --cluster`"
        if isinstance(error, ssl.SSLError):
            repair = "check [etcd] ca, certificate and key: each side has to accept the other's certificate"
        reason = str(error) or type(error).__name__
        return UnavailableError(
            f"etcd does not answer: {reason}"[:300], where=self.where, repair=repair
        )

    def metrics(self) -> bytes:
        """What the member that is connected says of itself in Prometheus's format; empty if it does not."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = self._connected()
                self._connection.request("GET", "/metrics")
                return self._connection.getresponse().read(_MOST_BYTES)
            except (OSError, http.client.HTTPException):
                self._disconnect()
                return b""

    def _ask(self, path: str, body: str) -> dict[str, Any]:
        if self._connection is None:
            self._connection = self._connected()
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", f"/v3/{path}", body, headers)
        response = self._connection.getresponse()
        content = response.read(_MOST_BYTES + 1)
        if response.status == http.HTTPStatus.NOT_FOUND and not content.startswith(b"{"):
            raise NotSupportedError(
                "etcd does not serve /v3",
                where=self.where,
                repair="use etcd 3.4 or later, and leave --enable-grpc-gateway on",
            )
        answer = json.loads(content)
        if not isinstance(answer, dict):
            answer = {"error": "the answer is not an object", "code": _UNKNOWN}
        if response.status != http.HTTPStatus.OK or "error" in answer:
            raise self._refusal(answer)
        return answer

    def _refusal(self, answer: Mapping[str, Any]) -> Exception:
        code, said = answer.get("code"), str(answer.get("error") or answer.get("message"))[:300]
        if code == _RESOURCE_EXHAUSTED and "space" in said:
            return DiskFullError(
                f"etcd: {said}",
                where=self.where,
                repair="compact and defragment etcd, then `etcdctl alarm disarm`: docs/log.md",
            )
        if code in _PASSING:
            return ValueError(said)
        return TusklineError(f"etcd refused the request: {said}", where=self.where)

    def _connected(self) -> http.client.HTTPConnection:
        host, _, port = self._settings.endpoints[self._member].rpartition(":")
        place, tls = host.strip("[]"), self._settings.tls
        if tls is None:
            return http.client.HTTPConnection(place, int(port), timeout=self._attempt)
        # Read again for each connection, as the files may have been replaced.
        context = ssl.create_default_context(cafile=str(tls.ca))
        context.load_cert_chain(tls.certificate, tls.key)
        return http.client.HTTPSConnection(place, int(port), timeout=self._attempt, context=context)

    def _next_member(self) -> None:
        self._disconnect()
        self._member = (self._member + 1) % len(self._settings.endpoints)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._disconnect()

    # -- keys ---------------------------------------------------------------------------------------

    def txn(self, txn: Mapping[str, Any], *, within: float) -> dict[str, Any]:
        """Perform a transaction whose keys are text, and whose values are bytes."""
        encoded: dict[str, Any] = _encoded(txn)
        return self.call("kv/txn", encoded, within=within)

    def get(self, key: str, *, within: float) -> "KeyValue | None":
        """One key, as a quorum knows it."""
        answer = self.call("kv/range", _encoded({"key": key}), within=within)
        return next(key_values(answer), None)

    def scan(self, prefix: str, *, within: float) -> "Iterator[KeyValue]":
        """The keys that begin with `prefix`, in order, all as of one revision; `within` for each page."""
        begin, end, revision = prefix, after_prefix(prefix), "0"
        while True:
            wanted = {"key": begin, "range_end": end, "limit": str(_PAGE), "revision": revision}
            answer = self.call("kv/range", _encoded(wanted), within=within)
            revision = answer["header"]["revision"] if revision == "0" else revision
            found = [*key_values(answer)]
            yield from found
            if not answer.get("more") or not found:
                return
            begin = found[-1].key + "\0"


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key of etcd with its value, the revisions of its creation and its last change, and its lease (0: none)."""

    key: str
    value: bytes
    created: int
    changed: int
    lease: int


def key_values(answer: Mapping[str, Any]) -> Iterator[KeyValue]:
    """The keys in the answer to a range."""
    for each in answer.get("kvs", ()):
        yield KeyValue(
            base64.b64decode(each["key"]).decode(),
            base64.b64decode(each.get("value", "")),
            int(each["create_revision"]),
            int(each["mod_revision"]),
            int(each.get("lease", 0)),
        )


def put(key: str, value: bytes, lease: int = 0) -> dict[str, Any]:
    """The operation that writes a key."""
    return {"request_put": {"key": key, "value": value, "lease": str(lease)}}


def delete(begin: str, end: str) -> dict[str, Any]:
    """The operation that removes the keys from `begin` to, exclusive, `end`."""
    return {"request_delete_range": {"key": begin, "range_end": end}}


def get(key: str) -> dict[str, Any]:
    """The operation that reads a key."""
    return {"request_range": {"key": key}}


def after_prefix(prefix: str) -> str:
    """The first key behind all that begin with the prefix, which ends with an ASCII character."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _encoded(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _encoded(each, key) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_encoded(each) for each in value]
    if isinstance(value, str) and name in {"key", "range_end"}:
        value = value.encode()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
