"""Copies in the background: what is handed over, and what becomes of a copy that is not wanted any more."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from spark_consumers.lake.copy.running import Copies
from spark_consumers.lake.manifest.table_version import TableVersion
from tests.support.waiting import wait_for
from walsender_bridge.errors import UnavailableError

NAME = "shop.public.t"


def chunks(*ends: int | None) -> TableVersion:
    return TableVersion(
        *("path", "iceberg", 1, "", ("id",), (), 90, 1, 0, 7, "copied"),
        chunks=tuple((end, 90) for end in ends),
    )


def request(**levels: TableVersion) -> Any:
    return SimpleNamespace(
        source=SimpleNamespace(stream="shop"),
        tables={"public.t"},
        levels={f"shop.public.{name}": table for name, table in levels.items()},
    )


class Copier:
    """Hands over chunks one by one, until it is not wanted any more."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.given = threading.Event()
        self.removed: list[str] = []

    def copy(self, _: Any, deliver: Any, progress: Any) -> None:
        deliver(NAME, chunks(10))
        self.given.set()
        wait_for(lambda: progress[NAME].is_unwanted or self.stop.is_set(), 10, "the end")
        deliver(NAME, chunks(10, 20))
        deliver(NAME, UnavailableError("the copy was stopped"))

    def remove(self, path: str) -> None:
        self.removed.append(path)


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_copy_that_ends_to_be_wanted_is_removed_unless_a_link_has_it(is_taken: bool) -> None:
    copier: Any = Copier()
    copies = Copies(copier)
    copies.start(request())
    assert copier.given.wait(10)
    if is_taken:
        assert list(copies.finished()) == [(NAME, chunks(10))]
    copies.drop(NAME)
    found: list[Any] = []

    def has_ended() -> bool:
        found.extend(copies.finished())
        return not copies.running

    wait_for(has_ended, 10, "its end")
    assert found == [(NAME, None)]
    assert copier.removed == ([] if is_taken else ["path"])
    copies.close()


class WholeCopier(Copier):
    """Hands over a whole table, once it is not wanted any more."""

    def copy(self, _: Any, deliver: Any, progress: Any) -> None:
        wait_for(lambda: progress[NAME].is_unwanted, 10, "the end")
        deliver(NAME, chunks())


@pytest.mark.parametrize("is_leveled", [True, False])
def test_a_table_that_was_brought_level_in_vain_keeps_its_folder(is_leveled: bool) -> None:
    copier: Any = WholeCopier()
    copies = Copies(copier)
    copies.start(request(t=chunks()) if is_leveled else request())
    assert copies.leveled(copies.running) == ({"path"} if is_leveled else set())
    copies.drop(NAME)
    found: list[Any] = []

    def has_ended() -> bool:
        found.extend(copies.finished())
        return not copies.running

    wait_for(has_ended, 10, "its end")
    assert found == [(NAME, None)]
    assert copier.removed == ([] if is_leveled else ["path"])
    assert copies.leveled(copies.running) == set()
    copies.close()
