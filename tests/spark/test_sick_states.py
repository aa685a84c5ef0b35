"""Each state of a sick installation is named with its cause and a hint wherever a person looks, and the hint works."""

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
from walsender_bridge.local_server import LocalServer, by_major

#: Until cause and hint are in a place; a look takes seconds on a busy machine.
SECONDS = 120


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", STATES)
def test_what_ails_is_named_everywhere_and_the_hint_works(installation: Shop, name: str) -> None:
    shop, state = installation, STATES[name]
    shop.healthy()
    sick = Sick(shop, logged=shop.tuskline.output.stat().st_size)
    with sick.undo:
        state.happens(sick)
        for place in state.places:
            named(sick, state, place)
        state.follow(sick)
    shop.healthy()


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


@pytest.fixture(scope="module")
def installation(tmp_path_factory, spark: SparkSession) -> Iterator[Shop]:
    folder: Path = tmp_path_factory.mktemp("shop")
    folder.chmod(0o755)
    server = LocalServer.create(by_major()[DEFAULT], folder / "server", settings={"fsync": "off"})
    with ExitStack() as stack:
        stack.callback(server.destroy)
        server.start()
        sources = make_databases(server)
        tuskline = stack.enter_context(Attached(folder, sources, lake=True, metrics=True))
        text = tuskline.config.read_text()
        disk = folder / "disk"
        disk.mkdir()
        stack.enter_context(mounted(disk, "-o", "size=300m"))
        tuskline.lake = disk / "lake"
        text = text.replace('uri = "lake"', f'uri = "{tuskline.lake}"')
        tuskline.config.write_text(text + '[logs]\nformat = "json"\n')
        tuskline.json("init")
        tuskline.up()
        shop = Shop(tuskline, server, spark)
        yield shop
        assert tuskline.stop_up() == 0
