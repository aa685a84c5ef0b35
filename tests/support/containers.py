"""A PostgreSQL in a container, where an engine runs.

The image is a setting, `TUSKLINE_TEST_POSTGRES_IMAGE` (default `postgres:16`): the official image on a
user's machine, one made from the host's own server where images cannot be pulled (tests/support/image).
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from functools import cache
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.support.waiting import wait_for
from walsender_bridge.postgres.client.replication_connection import describe

IMAGE = os.environ.get("TUSKLINE_TEST_POSTGRES_IMAGE", "postgres:16")
_SETTINGS = "-c wal_level=logical -c max_wal_senders=20 -c max_replication_slots=20"


@cache
def missing() -> str | None:
    """Why containers cannot be used here, or None. The engine is where DOCKER_HOST says, as for docker."""
    address = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    engine = urlsplit(address)
    family = socket.AF_UNIX if engine.scheme == "unix" else socket.AF_INET
    place = engine.path if engine.scheme == "unix" else (engine.hostname, engine.port or 2375)
    with socket.socket(family) as probe:
        probe.settimeout(5.0)
        try:
            probe.connect(place)
        except OSError as error:
            return f"no container engine at {address}: {error.strerror}"
    return None


@pytest.fixture(scope="session")
def container_dsn() -> Iterator[str]:
    """The DSN of a superuser on a PostgreSQL container with `wal_level = logical`."""
    if reason := missing():
        pytest.skip(reason)
    import docker
    from testcontainers.community.postgres import PostgresContainer

    with contextlib.closing(docker.from_env()) as engine:
        try:
            engine.images.get(IMAGE)
        except docker.errors.ImageNotFound:
            try:
                engine.images.pull(IMAGE)
            except docker.errors.APIError as error:
                pytest.skip(f"the image {IMAGE} is not here and cannot be pulled: {error}")
    made = PostgresContainer(IMAGE, username="owner", password="of-the-container", dbname="shop")
    with made.with_command(f"postgres {_SETTINGS}") as running:
        dsn = running.get_connection_url(driver=None)
        print(f"container: {IMAGE} at {describe(dsn)}")
        # The image's own start makes the database with a server that it then stops: what answers inside
        # the container may not answer on the port yet.
        wait_for(lambda: _answers(dsn), 120, "the container's server answers on its port")
        yield dsn


def _answers(dsn: str) -> bool:
    with contextlib.suppress(psycopg.OperationalError), psycopg.connect(dsn, connect_timeout=10):
        return True
    return False
