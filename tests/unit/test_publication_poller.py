"""A source that is not seen for long is named: what only its catalog shows would go unnoticed, and all would seem well."""

from collections.abc import Iterator

import pytest

from spark_consumers.lake.tables import sources
from spark_consumers.lake.tables.publication_poller import OVERDUE_SECONDS, PublicationPoller
from spark_consumers.lake.tables.shape import Publication
from spark_consumers.lake.tables.sources import Reading, Source
from tests.support.waiting import wait_for
from walsender_bridge.errors import TusklineError, UnavailableError

LOCKED = UnavailableError("canceling statement due to lock timeout", repair="see pg_locks")


class Servers:
    """What each source answers, and what time it is."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.refused: dict[str, TusklineError] = {}
        self.asked = 0

    def look(self, source: Source, _known: object, _last: object) -> Reading:
        self.asked += 1
        if error := self.refused.get(source.stream):
            raise error
        return Reading(Publication({}, frozenset(), 0, True, True), None, frozenset())


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers()
    monkeypatch.setattr(sources, "read_again", made.look)
    return made


@pytest.fixture
def looks(servers: Servers) -> Iterator[PublicationPoller]:
    made = PublicationPoller(
        [Source(name, "", name) for name in ("shop", "bank")], lambda: servers.now
    )
    yield made
    made.close()


def ask(looks: PublicationPoller, servers: Servers, *streams: str) -> set[str]:
    """The streams whose sources answered a question that was asked now."""
    before = servers.asked
    found = {stream for stream, *_ in looks.answers(streams, lambda _: (), at_once=True)}
    wait_for(lambda: servers.asked >= before + len(streams), 30, "all are asked")
    # What came after the patience is taken with the next call, which asks nobody.
    return found | {stream for stream, *_ in looks.answers((), lambda _: ())}


def test_a_source_that_is_asked_in_vain_for_long_is_named(
    looks: PublicationPoller, servers: Servers
) -> None:
    servers.refused["shop"] = LOCKED
    assert ask(looks, servers, "shop", "bank") == {"bank"}
    assert looks.overdue() is None
    servers.now += OVERDUE_SECONDS + 1
    assert ask(looks, servers, "shop", "bank") == {"bank"}
    error = looks.overdue()
    assert error is not None
    assert (error.where, error.repair) == ("source shop", "see pg_locks")
    assert "not been compared with the server's catalog for 61 s" in error.what
    assert "lock timeout" in error.what
    del servers.refused["shop"]
    assert ask(looks, servers, "shop", "bank") == {"shop", "bank"}
    assert looks.overdue() is None


def test_a_source_that_is_not_asked_any_more_is_not_named(
    looks: PublicationPoller, servers: Servers
) -> None:
    servers.refused["shop"] = LOCKED
    ask(looks, servers, "shop", "bank")
    servers.now += OVERDUE_SECONDS + 1
    ask(looks, servers, "bank")
    assert looks.overdue() is None
