"""Drivers of the lake that overtake one another: production's takeover, sweep and commit over a store in memory.

A driver that was stopped before any of its effects destroys nothing of a newer one, and never takes the lake back
(31); drivers under supervision settle on one (35). With a mend taken out, the explorer or the simulation says so.
"""

from unittest import mock

import pytest

from spark_consumers.lake.manifest import takeover
from spark_consumers.lake.manifest.takeover import DriverWait, Sign
from tests.support.lake.drivers import Driver
from tests.support.lake.explorer import begun, explore, with_links_given_up
from tests.support.lake.mutants import LEASES, NAMES, lease_mutant, mutant
from tests.support.lake.store import ViolationError
from tests.support.lake.supervised import Place, Supervised

SEEDS, MORE_SEEDS = 8, 300


def test_31_a_driver_stopped_anywhere_destroys_nothing_newer() -> None:
    count = explore()
    print(f"{count} interleavings")
    assert count > 1000


def test_31_tables_that_are_taken_when_they_are_changed_lose_nothing() -> None:
    with mock.patch.object(takeover, "AT_ONCE", 0):
        assert explore() > 1000


def test_31_a_table_that_is_taken_by_the_commit_of_a_write_loses_files() -> None:
    """An older driver removes what was prepared for a commit, in a table that looks its own."""
    with (
        mock.patch.object(takeover, "AT_ONCE", 0),
        mock.patch.object(Driver, "joins", new=True),
        pytest.raises(ViolationError, match="lacks"),
    ):
        explore()


@pytest.mark.parametrize("name", NAMES)
def test_31_the_explorer_finds_the_mutant(name: str) -> None:
    with mutant(name), pytest.raises(ViolationError) as found:
        explore()
    print(found.value)


def test_31_terms_of_lost_links_that_are_used_again_lose_rows_or_stop_all() -> None:
    found = set()
    with mutant("the terms of links that were lost are used again"):
        for lost in (1, 2, 3):
            place, stopped = 0, True
            while stopped:
                try:
                    stopped = with_links_given_up(place, lost)
                except ViolationError as error:
                    found.add(str(error).partition(":")[0].partition("\n")[0])
                    stopped = place < 60
                place += 1
    assert {"rows are lost", "the newer driver gives way, and there is no other"} <= found


def test_31_a_takeover_removes_what_a_dead_driver_left() -> None:
    run = begun()
    dead = {left.path for left in run.store.left()}
    files = set(run.store.files["tables/s/p/t0%t1-1"])
    run.go("next", Driver(run.store, "next").steps())
    gone = dead - {left.path for left in run.store.left()}
    assert {path.partition("/")[2] for path in gone if "epochs" in path or "%t2" in path}
    assert any("epochs/" in path for path in gone)
    assert any(takeover.term_of(path) == 2 for path in gone)
    assert "metadata/prepared-m0.avro" in files - run.store.files["tables/s/p/t0%t1-1"]


def test_what_a_driver_killed_anywhere_left_in_tables_is_found() -> None:
    """Also between the commit that expires snapshots and the removal of their files."""
    effects = 0
    while True:
        run = begun()
        ended = run.go("killed", Driver(run.store, "killed").steps(), effects)
        driver = Driver(run.store, "next")
        assert run.go("next", driver.steps())
        assert driver.head is not None
        for table in driver.head.versions:
            needed = set().union(*run.store.tables[table.path].snapshots.values())
            only_links = ("quarantine/", "index/")
            there = {f for f in run.store.files[table.path] if not f.startswith(only_links)}
            assert there - needed == set(), f"after {run.trace}"
        if ended:
            break
        effects += 1
    assert effects > 30


@pytest.mark.parametrize("place", Place)
@pytest.mark.parametrize("drivers", [2, 3])
@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(MORE_SEEDS, marks=pytest.mark.long)])
def test_35_drivers_under_supervision_settle_on_one(
    drivers: int, seeds: int, place: Place, seed: int
) -> None:
    for number in range(seeds):
        print(f"seed {seed + number}")
        Supervised(drivers, seed + number, place).run()


@pytest.mark.parametrize("name", LEASES)
def test_35_the_simulation_finds_the_mutant(name: str, seed: int) -> None:
    with lease_mutant(name), pytest.raises(ViolationError) as found:
        _simulate(3, seed)
    print(found.value)


def test_35_a_driver_at_work_that_does_not_look_goes_on_beside_its_successor(seed: int) -> None:
    with pytest.raises(ViolationError, match="is at work still"):
        _simulate(2, seed, looks=False)


def _simulate(drivers: int, seed: int, *, looks: bool = True) -> None:
    for number in range(MORE_SEEDS):
        for place in Place:
            Supervised(drivers, seed + number, place, looks=looks).run()


def test_35_a_driver_waits_for_signs_of_life_and_not_for_a_clock() -> None:
    standby = DriverWait(lease=10.0)
    looks = iter(range(1000))

    def waits(seconds: float, **signs: Sign) -> str | None:
        """After looking on for so many seconds."""
        found: str | None = None
        for _ in range(int(seconds)):
            found = standby.waits_for(3, signs, float(next(looks)))
        return found

    assert waits(1, a=Sign(3, b"1")) == "a"
    assert waits(9, a=Sign(3, b"2")) == "a"
    assert waits(1, a=Sign(3, b"2")) == "a"
    assert waits(1, a=Sign(3, b"2")) is None
    # It goes on: another driver's look begins anew.
    assert waits(1, a=Sign(3, b"3")) == "a"
    # One that is dead, one that was overtaken, one that waits itself.
    assert waits(1, b=Sign(3, b"1", is_dead=True), c=Sign(2, b"1"), d=Sign(0, b"1")) is None
    # One that is about to take over.
    assert waits(1, e=Sign(4, b"1")) == "e"


def test_35_a_driver_that_could_not_look_has_not_seen_silence() -> None:
    standby = DriverWait(lease=10.0)
    assert standby.waits_for(3, {"a": Sign(3, b"1")}, 0.0) == "a"
    # The store did not answer, or this process was suspended; so may the other one have been.
    assert standby.waits_for(3, {"a": Sign(3, b"1")}, 600.0) == "a"


def test_35_a_free_lock_of_another_machine_is_no_death_while_there_are_beats() -> None:
    standby = DriverWait(lease=10.0, unlocked_lease=3.0)
    for second in range(30):
        beats = {"a": Sign(3, str(second).encode(), is_unlocked=True)}
        assert standby.waits_for(3, beats, float(second)) == "a"
    found = [standby.waits_for(3, beats, 30.0 + second) for second in range(4)]
    assert found == ["a", "a", None, None]


@pytest.mark.parametrize(
    ("path", "term"),
    [
        ("tables/s/public/docs%t12-9f0c2a7b11de", 12),
        ("tables/s/public/docs", 0),
        ("tables/s/public/docs%2", 0),
        # A table of PostgreSQL that is called so: its % is written as %25.
        ("tables/s/public/docs%25t12-9f", 0),
        ("_tuskline/staging/00000000000000000007-t3-a1", 3),
        ("quarantine/00000000000000000007-t3-a1-rows.parquet", 3),
        ("quarantine/.00000000000000000007-t3-a1-rows.parquet.0a.tmp", 3),
        ("index/00000000000000000007-t3-a1.run", 3),
        ("index/.copy-t3-index.run.0a.tmp", 3),
        ("quarantine/copy-t4-0-9.parquet", 4),
        ("quarantine/skip-t5-0a.parquet", 5),
        ("quarantine/skip-0a.parquet", 0),
    ],
)
def test_a_name_says_the_term_of_its_writer(path: str, term: int) -> None:
    assert takeover.term_of(path) == term
