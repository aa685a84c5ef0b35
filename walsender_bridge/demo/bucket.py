"""The demo's bucket: of a server of S3 that is started here (versitygw), or a user's own."""

import contextlib
import http.client
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import UnavailableError, UsageError
from walsender_bridge.runtime import cache

#: The words of `--lake` besides a URL, and the bucket of the server that is started here.
FOLDER, S3, _BUCKET = "folder", "s3", "demo"
#: For a server that listens on this machine only, and ends with the demo.
KEYS: Final = {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "the-demo-of-this-machine"}
_REGION: Final = "us-east-1"
#: The variable with that server's port, for a REST catalog that is to write to its bucket. Any free port without it.
PORT: Final = "TUSKLINE_DEMO_S3_PORT"
#: What such a catalog has to be configured with.
CATALOG_NEEDS: Final = (
    f"s3://{_BUCKET} at http://127.0.0.1:PORT, with path-style access, region {_REGION} and "
    f"keys {' and '.join(KEYS.values())}"
)
#: Seconds until the server answers.
_START: Final = 30.0


@dataclass(frozen=True, slots=True)
class LakePlace:
    """Where the demo's lake is: `uri`, and further lines of its section."""

    uri: str
    lines: tuple[str, ...] = ()


def program() -> Path | None:
    """versitygw: on the path, or as the tests have built it; None if it is on neither."""
    found = shutil.which("versitygw")
    built = sorted((cache.folder() / "go").glob("versitygw-*/versitygw"))
    if found:
        return Path(found)
    return built[-1] if built else None


@contextlib.contextmanager
def lake_place(wanted: str, directory: Path) -> Iterator[LakePlace]:
    """The place of the lake, for as long as the block lasts.

    `wanted`: `folder`, `s3` for a server that is started here, or `s3://bucket/prefix`, which is reached as the environment says.
    Raises `UnavailableError` without a server, `UsageError` for another word.
    """
    if wanted == FOLDER:
        yield LakePlace(str(directory / "lake"))
    elif wanted.startswith("s3://"):
        yield LakePlace(wanted)
    elif wanted == S3:
        with _served(directory) as port:
            lines = (
                f'endpoint = "http://127.0.0.1:{port}"',
                f'region = "{_REGION}"',
                "allow_http = true",
            )
            yield LakePlace(f"s3://{_BUCKET}/lake", lines)
    else:
        raise UsageError(
            f"--lake {wanted!r} is no place for a lake",
            repair="specify folder, s3, or s3://bucket/prefix",
        )


@contextlib.contextmanager
def _served(directory: Path) -> Iterator[int]:
    """A server with an empty bucket, whose keys and address this process and its children have; its port."""
    server = program()
    if server is None:
        raise UnavailableError(
            "versitygw, an S3 server, is not installed",
            where="PATH",
            repair="go install github.com/versity/versitygw/cmd/versitygw@latest, or specify a bucket of your own: --lake s3://bucket/prefix",
        )
    port, data = named_port() or free_port(), directory / "s3"
    (data / _BUCKET).mkdir(parents=True)
    with environment(port), (directory / "s3.log").open("wb") as log:
        process = subprocess.Popen(
            [
                str(server),
                "--port",
                f"127.0.0.1:{port}",
                "posix",
                *metadata_options(directory),
                str(data),
            ],
            env={
                **os.environ,
                "ROOT_ACCESS_KEY": KEYS["AWS_ACCESS_KEY_ID"],
                "ROOT_SECRET_KEY": KEYS["AWS_SECRET_ACCESS_KEY"],
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            _wait(port, directory)
            yield port
        finally:
            process.kill()
            process.wait()


def named_port() -> int | None:
    """The port that the environment names; None without. Raises `UsageError` if it is none."""
    named = os.environ.get(PORT)
    if named is None:
        return None
    if not named.isdecimal() or not 0 < int(named) < 1 << 16:
        raise UsageError(f"{named!r} is not a port", where=PORT, repair="specify 1 to 65535")
    return int(named)


@contextlib.contextmanager
def environment(port: int) -> Iterator[None]:
    """The environment says how the server at this port is reached, with the demo's keys."""
    wanted = {
        **KEYS,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": _REGION,
        "AWS_ALLOW_HTTP": "true",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def metadata_options(folder: Path) -> list[str]:
    """Versitygw keeps an object's metadata in extended attributes, or else in files of their own, in this folder."""
    probe = folder / "probe"
    probe.touch()
    try:
        os.setxattr(probe, "user.tuskline", b"1")
    except OSError:
        beside = folder / "s3-metadata"
        beside.mkdir()
        return ["--sidecar", str(beside)]
    finally:
        probe.unlink()
    return []


def _wait(port: int, directory: Path) -> None:
    deadline = time.monotonic() + _START
    while not _answers(port):
        if time.monotonic() > deadline:
            raise UnavailableError(
                "the S3 server does not answer",
                where=f"127.0.0.1:{port}",
                repair=f"check its log, {directory / 's3.log'}",
            )
        time.sleep(0.05)


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/")
        connection.getresponse()
    except OSError:
        return False
    finally:
        connection.close()
    return True
