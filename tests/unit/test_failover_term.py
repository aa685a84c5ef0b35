"""A failover's leader term: an error that ends it is raised, and a proposer that does not end is reported."""

import threading
from collections.abc import Iterator

import pytest

from walsender_bridge.errors import DeadlineError, FencedError
from walsender_bridge.quorum.failover import term as leader_term
from walsender_bridge.quorum.failover.term import LeaderTerm


class Session:
    """Runs until the test says how it ends."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        self.go.wait(30)
        if self.error is not None:
            raise self.error


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session()
    yield session
    session.go.set()


def test_16_a_proposer_that_does_not_leave_its_office_is_an_error(session, monkeypatch):
    monkeypatch.setattr(leader_term, "_LEAVE_SECONDS", 0.1)
    term = LeaderTerm(lambda _tell: session)
    with pytest.raises(DeadlineError, match="has not ended"):
        term.close()
    session.go.set()
    monkeypatch.setattr(leader_term, "_LEAVE_SECONDS", 10.0)
    term.close()


def test_16_what_ended_the_term_is_raised(session):
    term = LeaderTerm(lambda _tell: session)
    term.check()
    assert not term.over
    session.error = FencedError("displaced")
    session.go.set()
    with pytest.raises(FencedError):
        term.wait(lambda: False, 10, "what is waited for")
    assert term.over
