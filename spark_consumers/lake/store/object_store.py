"""A lake's records as objects below a prefix of an S3 bucket.

Created by a conditional PUT, and by reading back whose content is there (`create`); replaced by a PUT, the last one wins. There
are no locks, so processes show by beats that they live (`living`). S3 promises what `LakeStore` asks for: a PUT, a
DELETE and a listing see every operation that returned before they began.

A creation and a beat are sent once: the client's own retries would hide what became of a creation, and let an older beat arrive
over a newer one. Other requests are repeated. Keys come from the environment (or the machine's role), as for every program that uses S3, and
are in no message of ours.
"""

import errno
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from enum import Enum, auto
from typing import Any, Self, cast
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import ObjectStore as Client
from obstore.store import S3Store

from spark_consumers.lake.store.create import Answer, Creation, Outcome, Request, step
from spark_consumers.lake.store.lake_store import STATE, Created, FoundRecord, StoreOptions
from walsender_bridge.errors import (
    LakeError,
    NotSupportedError,
    UnavailableError,
    UsageError,
)

#: Seconds until a connection, and then an answer, is given up; and for which the outcome of a creation is looked for.
_CONNECT, _ANSWER, _OUTCOME = 3.0, 10.0, 30.0
#: How often a request is repeated, and for how many seconds.
_REPETITIONS, _REPEATED = 5, 20.0

_REACH = (
    "check that the endpoint, the region and the network of the bucket are right; it is retried"
)
_KEYS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of a user who may list the bucket and get, put and delete"
    " its objects"
)
_RENEW = (
    "the keys in the environment have expired: set new ones, and start the process again; those of a role (of the machine, of a container"
    " or by AWS_WEB_IDENTITY_TOKEN_FILE) are renewed by themselves"
)
#: What helps, by what S3 calls the reason of a refusal.
_REPAIRS = {
    "ExpiredToken": _RENEW,
    "TokenRefreshRequired": _RENEW,
    "InvalidToken": _KEYS,
    "RequestTimeTooSkewed": "set the clock of this machine: it differs by minutes from the store's",
}
_STATUS = re.compile(r"status code: (\d+)")
#: Nothing else of an answer is shown: some contain the name of a key.
_CODE = re.compile(r"<Code>(\w+)</Code>")
#: The process that has used the client.
_process = 0


class ObjectStore:
    """The lake's records below `location`, in a bucket (`LakeStore`).

    `once` sends a request once, `repeating` again after a failure; both have the lake's prefix. `outcome`: seconds for which
    the outcome of a creation is looked for.
    """

    has_locks = False
    lock_domain = ""
    pause = 1.0
    folder = None

    def __init__(
        self, location: str, once: Client, repeating: Client, outcome: float = _OUTCOME
    ) -> None:
        self.location = location
        self._once = once
        self._repeating = repeating
        self._outcome = outcome

    @classmethod
    def at(
        cls, url: str, options: StoreOptions, *, answer: float = _ANSWER, outcome: float = _OUTCOME
    ) -> Self:
        """The store at `s3://bucket/prefix`; an answer may take `answer` seconds. Raises `UsageError` for another URL."""
        bucket, prefix = _parts(url)
        _check(options)
        given = {"endpoint": options.endpoint, "region": options.region}

        def client(retries: int) -> S3Store:
            return S3Store(
                bucket,
                prefix=prefix,
                config=cast("Any", {key: value for key, value in given.items() if value}),
                client_options={
                    "connect_timeout": timedelta(seconds=_CONNECT),
                    "timeout": timedelta(seconds=answer),
                    "allow_http": options.allow_http or _is_http_allowed(),
                },
                retry_config={
                    "max_retries": retries,
                    "retry_timeout": timedelta(seconds=_REPEATED),
                },
            )

        return cls(f"s3://{bucket}/{prefix}", client(0), client(_REPETITIONS), outcome)

    def create(self, name: str, content: "bytes | memoryview") -> Created:
        """See `LakeStore`. The protocol is `create`'s; this sends its requests."""
        deadline = time.monotonic() + self._outcome
        creation = Creation()
        while True:
            time.sleep(creation.pause)
            answer, said = self._ask(creation.request, name, content)
            made = step(creation, answer, late=time.monotonic() >= deadline)
            match made:
                case Outcome.WON:
                    return Created.WON
                case Outcome.LOST:
                    return Created.LOST
                case Outcome.UNKNOWN:
                    raise UnavailableError(
                        f"it is not known whether the record was created{said}",
                        where=self.where(name),
                        repair=_REACH,
                    )
                case Creation():
                    creation = made

    def _ask(
        self, request: Request, name: str, content: "bytes | memoryview"
    ) -> tuple[Answer, str]:
        """The answer to one request, and what the store said if it was none."""
        _check_process()
        try:
            if request is Request.CREATE:
                obstore.put(self._once, name, content, mode="create", use_multipart=False)
                return Answer.CREATED, ""
            found = obstore.get(self._once, name).bytes().to_bytes()
            return (Answer.OWN if found == content else Answer.ANOTHERS), ""
        except (AlreadyExistsError, PreconditionError):
            return Answer.EXISTS, ""
        except (BaseError, FileNotFoundError) as error:
            why = _reason(error)
            if why is _Reason.ABSENT and request is Request.READ_BACK:
                return Answer.NOTHING, ""
            if why is _Reason.OTHER:
                return Answer.NO_ANSWER, f": {_first_line(error)}"
            raise self._refused(why, name, _code(error)) from None

    def read(self, name: str) -> bytes:
        """See `LakeStore`."""
        with self._asking(name):
            return obstore.get(self._repeating, name).bytes().to_bytes()

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """See `LakeStore`."""
        with self._asking(name):
            return obstore.get_range(self._repeating, name, start=offset, length=length).to_bytes()

    def replace(self, name: str, content: bytes, *, durable: bool = True) -> None:  # noqa: ARG002  # always is
        """See `LakeStore`."""
        with self._asking(name, of_bucket=True):
            obstore.put(self._repeating, name, content, use_multipart=False)

    def replace_once(self, name: str, content: bytes) -> None:
        """The same without a repetition, which could arrive over a later content."""
        with self._asking(name, of_bucket=True):
            obstore.put(self._once, name, content, use_multipart=False)

    def names(self, folder: str) -> list[str]:
        """See `LakeStore`. A listing costs one request for 1,000 names."""
        with self._asking(folder, of_bucket=True):
            found = obstore.list_with_delimiter(self._repeating, folder)["objects"]
        return [each["path"].rpartition("/")[2] for each in found]

    def remove(self, name: str) -> None:
        """See `LakeStore`."""
        with suppress(FileNotFoundError), self._asking(name):
            obstore.delete(self._repeating, name)

    def exists(self, name: str) -> bool:
        """See `LakeStore`."""
        try:
            with self._asking(name):
                obstore.head(self._repeating, name)
        except FileNotFoundError:
            return False
        return True

    def described(self, name: str) -> tuple[int, int]:
        """Its bytes, and when it was written, in nanoseconds."""
        with self._asking(name):
            found = obstore.head(self._repeating, name)
        return found["size"], _nanoseconds(found["last_modified"])

    def listed(self, folder: str) -> tuple[list[tuple[str, int, int]], list[str]]:
        """The objects in the folder, as name, bytes and nanoseconds, and the names of the folders in it."""
        with self._asking(folder, of_bucket=True):
            found = obstore.list_with_delimiter(self._repeating, folder)
        objects = [
            (each["path"].rpartition("/")[2], each["size"], _nanoseconds(each["last_modified"]))
            for each in found["objects"]
        ]
        return objects, [each.rpartition("/")[2] for each in found["common_prefixes"]]

    def listed_since(self, folder: str, name: str) -> list[tuple[str, int, int]]:
        """The objects in the folder with a greater name than this one, as `listed` gives them. It has no folders."""
        with self._asking(folder, of_bucket=True):
            batches = list(obstore.list(self._repeating, f"{folder}/", offset=f"{folder}/{name}"))
        return [
            (each["path"].rpartition("/")[2], each["size"], _nanoseconds(each["last_modified"]))
            for batch in batches
            for each in batch
        ]

    def has_any(self, folder: str) -> bool:
        """Whether any object is below it."""
        with self._asking(folder, of_bucket=True):
            return any(
                batch
                for batch in obstore.list(
                    self._repeating, f"{folder}/" if folder else None, chunk_size=1
                )
            )

    def remove_below(self, folder: str) -> None:
        """Remove all objects below it."""
        with self._asking(folder, of_bucket=True):
            for batch in obstore.list(self._repeating, f"{folder}/"):
                obstore.delete(self._repeating, [each["path"] for each in batch])

    def put_aside(self, name: str, to: str) -> None:
        """See `LakeStore`."""
        self.replace(to, self.read(name))
        self.remove(name)

    def hold(self, name: str, content: bytes, *, locked: bool) -> "BeatingObject":  # noqa: ARG002  # its beats do
        """See `LakeStore`."""
        self.replace_once(name, content)
        return BeatingObject(self, name)

    def held(self, folder: str) -> Iterator[FoundRecord]:
        """See `LakeStore`."""
        for name in self.names(folder):
            with suppress(FileNotFoundError):
                yield FoundRecord(name, self.read(f"{folder}/{name}"))

    def where(self, name: str) -> str:
        """See `LakeStore`."""
        return f"{self.location}/{name}"

    def is_at(self, location: str) -> bool:
        """See `LakeStore`."""
        return location == self.location

    def check(self) -> None:
        """See `LakeStore`: some servers take a conditional creation for an ordinary one."""
        name = f"{STATE}/probe-{uuid.uuid4().hex}"
        try:
            outcomes = [self.create(name, content) for content in (b"first", b"second")]
        finally:
            self.remove(name)
        if outcomes != [Created.WON, Created.LOST]:
            raise NotSupportedError(
                "the object store replaces an object that was to be created (it ignores If-None-Match)",
                where=self.location,
                repair="use a store with conditional writes, such as Amazon S3",
            )

    def prepare(self, folder: str) -> None:
        """See `LakeStore`: a name is enough."""

    def may_remove(self, folder: str) -> bool:  # noqa: ARG002  # nothing says so before it is tried
        """See `LakeStore`."""
        return True

    def drafts(self, folder: str) -> tuple[str, ...]:  # noqa: ARG002  # an object is whole or not there
        """See `LakeStore`."""
        return ()

    def sweep_drafts(self) -> int:  # as `drafts`
        """See `LakeStore`."""
        return 0

    @contextmanager
    def _asking(self, name: str, *, of_bucket: bool = False) -> Iterator[None]:
        """The store's errors as ours. `of_bucket`: if something does not exist, it is the bucket."""
        _check_process()
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            why = _reason(error)
            where = self.where(name)
            if why is _Reason.ABSENT and not of_bucket:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where) from None
            if why is _Reason.OTHER:
                raise UnavailableError(
                    f"the object store does not answer: {_first_line(error)}",
                    where=where,
                    repair=_REACH,
                ) from None
            raise self._refused(why, name, _code(error)) from None

    def _refused(self, why: "_Reason", name: str, code: str) -> LakeError:
        if why is _Reason.ABSENT:
            return LakeError(
                "the bucket does not exist",
                where=self.where(name),
                repair="create it, or specify another one; the lake's driver creates no buckets",
            )
        return LakeError(
            f"the object store refuses access{f' ({code})' if code else ''}",
            where=self.where(name),
            repair=_REPAIRS.get(code, _KEYS),
        )


class BeatingObject:
    """An object that its process rewrites for as long as it lives (`HeldRecord`)."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store = store
        self._name = name

    def write(self, content: bytes) -> None:
        """See `HeldRecord`. After an error an earlier write may still arrive over a later one."""
        self._store.replace_once(self._name, content)

    def is_lost(self) -> bool:  # the next beat makes it again
        """See `HeldRecord`."""
        return False

    def close(self) -> None:
        """See `HeldRecord`."""
        self._store.remove(self._name)

    def abandon(self) -> None:
        """See `HeldRecord`: nothing of it is this process's own."""


def _parts(url: str) -> tuple[str, str]:
    """Bucket and prefix."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _no_url(url.rpartition("@")[2]) from None
    prefix = parts.path.strip("/")
    if "@" in parts.netloc:
        # Not shown: the text before it may be a secret.
        raise UsageError(
            "a lake's URL must not contain keys",
            where=f"s3://{parts.netloc.rpartition('@')[2]}{parts.path}",
            repair="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment",
        )
    if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment:
        raise _no_url(url)
    # No file could be reached below such a prefix: clients read these as steps in a path.
    if not {"", ".", ".."}.isdisjoint(prefix.split("/")):
        raise _no_url(url)
    return parts.netloc, prefix


def _no_url(shown: str) -> UsageError:
    return UsageError(
        "not the URL of a lake in a bucket",
        where=shown,
        repair="specify s3://bucket/prefix, with neither '//' nor '.' or '..' between slashes in the prefix",
    )


def _check(options: StoreOptions) -> None:
    """Raise `UsageError` for an endpoint that is none, has keys, or would not be used."""
    endpoint = options.endpoint
    if endpoint is None:
        _check_environment(options)
        return
    parts = urlsplit(endpoint)
    where = "[lake] endpoint"
    if parts.scheme not in {"http", "https"} or not parts.netloc or "@" in parts.netloc:
        raise UsageError(
            "the endpoint is not a URL of the form https://host:port",
            where=where,
            repair="specify it without a user; keys come from the environment",
        )
    if parts.scheme == "http" and not options.allow_http:
        raise UsageError(
            f"the endpoint {endpoint} does not use TLS",
            where=where,
            repair="use https://, or set allow_http = true if the network is trusted",
        )


def _check_environment(options: StoreOptions) -> None:
    """The client would name neither the address nor what it lacks."""
    environment = os.environ
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or ""
    if endpoint.startswith("http://") and not (options.allow_http or _is_http_allowed()):
        raise UsageError(
            f"the endpoint {endpoint.rpartition('@')[2]} does not use TLS",
            where="AWS_ENDPOINT_URL",
            repair="use https://, or set AWS_ALLOW_HTTP=true if the network is trusted",
        )


def _nanoseconds(moment: datetime) -> int:
    return int(moment.timestamp()) * 1_000_000_000


def _is_http_allowed() -> bool:
    """Whether the environment says so: the client looks there only if it is given no options."""
    return os.environ.get("AWS_ALLOW_HTTP", "").lower() in {"1", "true"}


class _Reason(Enum):
    """Why a request has failed."""

    ABSENT = auto()
    FORBIDDEN = auto()
    OTHER = auto()


def _reason(error: Exception) -> _Reason:
    """A listing's errors have no class of their own, but name the status."""
    status = _STATUS.search(_first_line(error))
    if isinstance(error, NotFoundError | FileNotFoundError) or (status and status[1] == "404"):
        return _Reason.ABSENT
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or _code(error) in _REPAIRS:
        return _Reason.FORBIDDEN
    return _Reason.FORBIDDEN if status and status[1] in {"401", "403"} else _Reason.OTHER


def _code(error: Exception) -> str:
    """What S3 calls the reason; empty if it does not say, as for HEAD."""
    found = _CODE.search(str(error))
    return found[1] if found else ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]


def _check_process() -> None:
    """The client's threads do not survive a fork: without this, a child of a process that has used it would hang."""
    global _process  # noqa: PLW0603  # one runtime for each process
    _process = _process or os.getpid()
    if _process != os.getpid():
        raise NotSupportedError(
            "an object store cannot be used in a process that was forked after its parent has used one",
            where=f"process {os.getpid()}",
            repair="start the process by spawn, or fork before the lake is opened",
        )
