"""Each state of a sick installation is named with its cause and a hint wherever a person looks, and the hint works."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support.attached import Attached
from tests.support.servers import DEFAULT
from tests.support.shop import Shop, make_databases
from tests.support.sick_states import STATES, Sick, State
from tests.support.small_disk import mounted
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer, by_major

#: Until cause and hint are in a place; a look takes seconds on a busy machine.
SECONDS = 120
#: One of the lake and one of the machine run each time, the others in the long runs.
OFTEN = {"a paused table"}


class Installations:
    """The installation that the states of this module share; a new one after a state that did not end in health."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._open = ExitStack()
        self._shop: Shop | None = None

    def get(self) -> Shop:
        """One in health."""
        if self._shop is None:
            self._shop = self._make()
        self._shop.healthy()
        return self._shop

    def discard(self) -> None:
        """End the one that there is."""
        self._shop = None
        self._open.close()

    def _make(self) -> Shop:
        folder = Path(
            self._open.enter_context(tempfile.TemporaryDirectory(prefix="tuskline-test-"))
        )
        folder.chmod(0o755)
        server = LocalServer.create(
            by_major()[DEFAULT], folder / "server", settings={"fsync": "off"}
        )
        servers = [server]
        self._open.callback(destroy, servers)
        server.start()
        sources, disk = make_databases(server), folder / "disk"
        disk.mkdir()
        self._open.enter_context(mounted(disk, "-o", "size=300m"))
        tuskline = self._open.enter_context(Attached(folder, sources, lake=True, metrics=True))
        tuskline.lake = disk / "lake"
        text = tuskline.config.read_text().replace('uri = "lake"', f'uri = "{tuskline.lake}"')
        tuskline.config.write_text(text + '[logs]\nformat = "json"\n')
        tuskline.json("init")
        tuskline.up()
        return Shop(tuskline, server, self._spark, servers)


def destroy(servers: list[LocalServer]) -> None:
    """All that have been at the DSN by then."""
    for server in servers:
        server.destroy()


@pytest.fixture(scope="module")
def installations(spark: SparkSession) -> Iterator[Installations]:
    made = Installations(spark)
    yield made
    made.discard()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in OFTEN else [pytest.mark.long]) for n in STATES]
)
def test_what_ails_is_named_everywhere_and_the_hint_works(
    installations: Installations, name: str
) -> None:
    state, shop = STATES[name], installations.get()
    sick = Sick(shop, logged=shop.tuskline.output.stat().st_size)
    try:
        with sick.undo:
            state.happens(sick)
            for place in state.places:
                named(sick, state, place)
            state.follow(sick)
        shop.healthy()
    except BaseException:
        installations.discard()
        raise


def named(sick: Sick, state: State, place: str) -> None:
    said = ""

    def is_named() -> bool:
        nonlocal said
        said = sick.said(place, state)
        return state.cause in said and state.hint in said

    try:
        wait_for(is_named, SECONDS, "cause and hint")
    except AssertionError:
        raise AssertionError(f"{place}: {said}\n{sick.tuskline.logs()}") from None
