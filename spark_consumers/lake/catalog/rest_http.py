"""Requests to an Iceberg REST catalog: URLs, authorization, and what came back. What they are for is `rest_catalog`'s.

A request is sent once: what may be repeated, the caller knows. The one exception is a token that has run out, since a
request that is refused for it was not carried out.

Credentials come from the environment or from a file, never from a URL or the configuration, and go to no other server: a
redirection is not followed, and a server without TLS is refused unless it was allowed by name.
"""

import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import urllib3

from spark_consumers.spark.lake_catalog import CREDENTIAL, TOKEN
from walsender_bridge.errors import (
    AuthenticationError,
    ConfigError,
    PrivilegeError,
    RefusedByCatalogError,
    TusklineError,
    UnavailableError,
    UnsupportedByCatalogError,
    UsageError,
)
from walsender_bridge.runtime import logs, secret_file

#: Seconds for a connection, and for an answer.
_CONNECT, _ANSWER = 5.0, 30.0
#: Seconds from which on an answer is slow, and for which it is told after that.
_SLOW, _TOLD = 5.0, 60.0
#: Seconds before its end at which a token is replaced, and its life if the server does not state it.
_MARGIN, _LIFE = 30.0, 300.0
#: Bytes of an answer, at most: the metadata of a table with tens of thousands of snapshots.
_MOST = 256 << 20
#: The separator of a namespace's parts in a URL, encoded, unless the server's configuration has another (Iceberg REST specification).
_SEPARATOR = "%1F"
_OK, _UNAUTHORIZED, _FORBIDDEN, _EXPIRED = 200, 401, 403, 419
#: What a server says of an operation that it does not have: HTTP's method not allowed and not implemented, and the specification's own.
_UNSUPPORTED = {405, 406, 501}

log = logs.logger()


@dataclass(frozen=True, slots=True)
class RestOptions:
    """How a catalog is reached.

    `uri`: up to `/v1`. `oauth2_uri`: where tokens come from, if not from the catalog. `token_file`: a file with a bearer
    token, which is read again when the token is refused. `allow_http`: the URLs may be http, and the token readable on the
    way. `answer`: seconds for an answer. `slow`: seconds from which on an answer is told of (`RestClient.trouble`).
    """

    uri: str
    warehouse: str = ""
    oauth2_uri: str = ""
    scope: str = "catalog"
    token_file: Path | None = None
    ca: Path | None = None
    allow_http: bool = False
    answer: float = _ANSWER
    slow: float = _SLOW


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: its status, and its JSON (empty if it has none)."""

    status: int
    body: Mapping[str, Any]

    @property
    def is_ok(self) -> bool:
        """Whether the request was carried out."""
        return _OK <= self.status < 300

    @property
    def reason(self) -> str:
        """What the server says of a request that it did not carry out."""
        # What is before a catalog, as Jetty, has the message beside the status.
        error = self.body.get("error", self.body)
        said = error.get("message") if isinstance(error, Mapping) else error
        return f"{self.status} {said or 'without a reason'}".partition("\n")[0][:300]


class NoReplyError(Exception):
    """No answer, or one that does not say whether the request was carried out: why."""


class RestClient:
    """The requests of one process to one catalog; threads may share it. `where`: for messages."""

    def __init__(self, options: RestOptions) -> None:
        for uri in filter(None, (options.uri, options.oauth2_uri)):
            _check(uri, options)
        self._options = options
        self.where = options.uri
        self._prefix = ""
        self._separator = _SEPARATOR
        self._pool = urllib3.PoolManager(
            maxsize=16,
            retries=False,
            timeout=urllib3.Timeout(connect=_CONNECT, read=options.answer),
            ca_certs=str(options.ca) if options.ca else None,
        )
        self._lock = threading.Lock()
        self._token = ""
        self._ends = 0.0
        #: The last slow answer: what was asked, how long it took in seconds, and when it had come.
        self._slowest: tuple[str, float, float] | None = None
        self._told_at = float("-inf")
        #: The last operation that the server said it does not have, and when.
        self._unsupported: tuple[UnsupportedByCatalogError, float] | None = None

    def configure(self) -> Mapping[str, Any]:
        """Ask for the server's configuration, whose prefix and separator of namespaces all later requests have."""
        query = {"warehouse": self._options.warehouse} if self._options.warehouse else {}
        reply = self.asked("GET", "/v1/config", query=query)
        found = {**reply.body.get("defaults", {}), **reply.body.get("overrides", {})}
        self._prefix = f"/{quote(found['prefix'], safe='/')}" if found.get("prefix") else ""
        self._separator = found.get("namespace-separator") or _SEPARATOR
        return reply.body

    def asked(
        self, method: str, path: str, body: Any = None, *, query: Mapping[str, str] | None = None
    ) -> Reply:
        """The answer to a request that has to succeed. Raises `UnavailableError` for none, and what `refused` gives."""
        try:
            reply = self.send(method, path, body, query=query)
        except NoReplyError as error:
            raise self.silent(error) from None
        if not reply.is_ok:
            raise self.refused(reply)
        return reply

    def send(
        self, method: str, path: str, body: Any = None, *, query: Mapping[str, str] | None = None
    ) -> Reply:
        """The answer to a request that is sent once.

        Raises `NoReplyError`, `AuthenticationError` and `PrivilegeError`.
        """
        url = f"{self._options.uri.rstrip('/')}{path}"
        url += f"?{urlencode(query)}" if query else ""
        content = None if body is None else json.dumps(body).encode()
        token = self._authorization(refused="")
        reply = self._send(method, url, content, token)
        if reply.status in {_UNAUTHORIZED, _EXPIRED} and token:
            reply = self._send(method, url, content, self._authorization(refused=token))
        if reply.status in {_UNAUTHORIZED, _EXPIRED}:
            raise AuthenticationError(
                f"the catalog refuses the token: {reply.reason}", where=self.where, repair=_KEYS
            )
        if reply.status == _FORBIDDEN:
            raise PrivilegeError(
                f"the catalog refuses access: {reply.reason}",
                where=self.where,
                repair="grant the client the right to create, read, change and drop the lake's tables",
            )
        return reply

    def namespace(self, parts: tuple[str, ...]) -> str:
        """The path of a namespace."""
        encoded = self._separator.join(quote(part, safe="") for part in parts)
        return f"{self.path('namespaces')}/{encoded}"

    def table(self, namespace: tuple[str, ...], name: str) -> str:
        """The path of a table."""
        return f"{self.namespace(namespace)}/tables/{quote(name, safe='')}"

    def path(self, name: str) -> str:
        """A path below the server's prefix."""
        return f"/v1{self._prefix}/{name}"

    def trouble(self) -> TusklineError | None:
        """What was wrong with the catalog within the last minute, though it answered: it lacks an operation, or is slow."""
        if self._unsupported is not None and time.monotonic() - self._unsupported[1] <= _TOLD:
            return self._unsupported[0]
        if self._slowest is None or time.monotonic() - self._slowest[2] > _TOLD:
            return None
        asked, seconds, _ = self._slowest
        return UnavailableError(
            f"the catalog answers slowly: {asked} took {seconds:.0f} s",
            where=self.where,
            repair="check the catalog's load; the lake waits for it, and needs no action",
        )

    def forget_trouble(self) -> None:
        """Forget which operations the server did not have so far."""
        self._unsupported = None

    def silent(self, error: Exception) -> UnavailableError:
        """The error of a catalog that does not answer."""
        return UnavailableError(
            f"the catalog does not answer: {error}",
            where=self.where,
            repair="check its address, and that it is running",
        )

    def refused(self, reply: Reply) -> RefusedByCatalogError | UnsupportedByCatalogError:
        """The error of a request that the catalog did not carry out."""
        if reply.status in _UNSUPPORTED:
            unsupported = UnsupportedByCatalogError(
                f"the catalog does not support the request: {reply.reason}",
                where=self.where,
                repair="check the catalog's version and settings; the request is retried automatically",
            )
            self._unsupported = unsupported, time.monotonic()
            return unsupported
        return RefusedByCatalogError(
            f"the catalog refuses the request: {reply.reason}",
            where=self.where,
            repair="check the catalog's log, and which version of the REST specification it implements",
        )

    # -- one request --------------------------------------------------------------------------------

    def _send(self, method: str, url: str, content: bytes | None, token: str) -> Reply:
        headers = {
            "Accept": "application/json",
            "Content-Type": "application/json",
            # For this table and this client alone; a server that has none answers without.
            "X-Iceberg-Access-Delegation": "vended-credentials",
        }
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return self._exchange(method, url, content, headers)

    def _exchange(
        self, method: str, url: str, content: bytes | None, headers: Mapping[str, str]
    ) -> Reply:
        began = time.monotonic()
        try:
            return self._answer(method, url, content, headers)
        finally:
            now = time.monotonic()
            if now - began >= self._options.slow:
                self._note(f"{method} {urlsplit(url).path}", now - began, now)

    def _note(self, asked: str, seconds: float, now: float) -> None:
        """Remember a slow answer, and log it: once a minute."""
        self._slowest = asked, seconds, now
        if now - self._told_at >= _TOLD:
            self._told_at = now
            log.warning(
                "the catalog answers slowly",
                catalog=self.where,
                request=asked,
                seconds=round(seconds, 1),
            )

    def _answer(
        self, method: str, url: str, content: bytes | None, headers: Mapping[str, str]
    ) -> Reply:
        until = time.monotonic() + self._options.answer
        try:
            response = self._pool.request(
                method, url, body=content, headers=headers, redirect=False, preload_content=False
            )
            try:
                text = bytearray()
                while chunk := response.read(1 << 20):
                    text += chunk
                    # A server that sends a byte now and then never exceeds the timeout of one.
                    if len(text) > _MOST or time.monotonic() > until:
                        raise NoReplyError("its answer does not end")
            finally:
                response.close() if response.length_remaining else response.release_conn()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise NoReplyError(_first_line(error)) from None
        if 300 <= response.status < 400:
            raise NoReplyError(f"status {response.status}, a redirection, which is not followed")
        try:
            body = json.loads(text) if text else {}
        except ValueError:
            body = None
        reply = Reply(response.status, body if isinstance(body, Mapping) else {})
        if (
            response.status >= 500 and response.status not in _UNSUPPORTED
        ) or response.status == 429:
            raise NoReplyError(f"status {reply.reason}")
        if not isinstance(body, Mapping):
            raise NoReplyError(f"status {response.status}, and no JSON object")
        return reply

    # -- authorization ------------------------------------------------------------------------------

    def _authorization(self, *, refused: str) -> str:
        """The token; another one than `refused`, if there is another. Empty: requests have none."""
        with self._lock:
            if self._token and self._token != refused and time.monotonic() < self._ends:
                return self._token
            token, life = self._new_token()
            self._token, self._ends = token, time.monotonic() + life - _MARGIN
            return token

    def _new_token(self) -> tuple[str, float]:
        file = self._options.token_file
        if file is not None:
            return _read_secret(file), _LIFE
        if token := os.environ.get(TOKEN):
            return token, _LIFE
        credential = os.environ.get(CREDENTIAL)
        return self._granted(credential) if credential else ("", _LIFE)

    def _granted(self, credential: str) -> tuple[str, float]:
        """A token for a client's id and secret (OAuth 2, client credentials), and its life in seconds."""
        client, colon, secret = credential.partition(":")
        if not colon:
            raise ConfigError(
                "the client's credential lacks a secret",
                where=CREDENTIAL,
                repair=f"set {CREDENTIAL} to the client's id, a colon, and its secret",
            )
        form = {
            "grant_type": "client_credentials",
            "client_id": client,
            "client_secret": secret,
            "scope": self._options.scope,
        }
        url = self._options.oauth2_uri or f"{self._options.uri.rstrip('/')}/v1/oauth/tokens"
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        reply = self._exchange("POST", url, urlencode(form).encode(), headers)
        token = reply.body.get("access_token")
        if not reply.is_ok or not isinstance(token, str):
            raise AuthenticationError(
                f"no token for the client {client!r}: {reply.reason}", where=url, repair=_KEYS
            )
        life = reply.body.get("expires_in")
        return token, float(life) if isinstance(life, int | float) else _LIFE


_KEYS = f"set {TOKEN} to a valid token, or {CREDENTIAL} to the client's id:secret"


def _check(uri: str, options: RestOptions) -> None:
    """Raise `UsageError` for a URL that is none, has a secret, or would show one on the way."""
    parts = urlsplit(uri)
    if parts.scheme not in {"http", "https"} or not parts.netloc or "@" in parts.netloc:
        # Not shown: what is before the @ may be a secret.
        raise UsageError(
            "the catalog's address is not a URL of the form https://host:port/path",
            where=f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}",
            repair=f"specify it without a user; set {TOKEN} or {CREDENTIAL} in the environment",
        )
    if parts.scheme == "http" and not options.allow_http:
        raise UsageError(
            "the catalog's address does not use TLS",
            where=uri,
            repair="use https://, or set allow_http = true if the network is trusted",
        )


def _read_secret(file: Path) -> str:
    try:
        its, token = file.stat(), file.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"the token cannot be read: {error.strerror}",
            where=str(file),
            repair="specify a file that contains the catalog's token",
        ) from None
    secret_file.check(file, its, "token", "replace the token, and keep it in a file of mode 0600")
    return token


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0][:300]
