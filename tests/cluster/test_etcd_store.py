"""The repository's records in etcd: whoever leads next finds them all, and only the leader writes."""

import contextlib
import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from tests.support.etcd import EtcdCluster, needs_etcd
from tests.unit.test_repository_store import fill
from walsender_bridge.change_log.repository import etcd_store, leader_lease
from walsender_bridge.change_log.repository.core import (
    ConsumerSeen,
    Created,
    StreamCreated,
    TermGiven,
)
from walsender_bridge.change_log.repository.etcd import Etcd, EtcdSettings, put
from walsender_bridge.change_log.repository.etcd_store import EtcdStore
from walsender_bridge.change_log.repository.leader_lease import Leader, try_to_lead
from walsender_bridge.errors import (
    CorruptError,
    NotLeaderError,
    NotSupportedError,
    UnavailableError,
)

pytestmark = needs_etcd


@pytest.fixture
def settings(etcd: EtcdCluster, request: pytest.FixtureRequest) -> EtcdSettings:
    name = "".join(c for c in request.node.name if c.isalnum())
    return etcd.settings(prefix=f"/{name}/")


def lead(settings: EtcdSettings) -> Leader:
    found = try_to_lead(settings, "127.0.0.1:1")
    assert isinstance(found, Leader)
    return found


def stored(settings: EtcdSettings, leader: Leader) -> dict[str, Any]:
    """The state as one finds it who reads it now."""
    with_all = EtcdStore(settings, leader)
    try:
        return with_all.state.to_record()
    finally:
        with_all.close()


@pytest.mark.parametrize("checkpoint_every", [1, 7, 1000])
def test_the_next_leader_finds_the_same_state(
    settings: EtcdSettings, checkpoint_every: int
) -> None:
    expected: dict[str, Any] | None = None
    fence = 0
    for turn in range(4):
        leader = lead(settings)
        assert leader.fence > fence
        fence = leader.fence
        store = EtcdStore(settings, leader, checkpoint_every=checkpoint_every)
        if expected is not None:
            assert store.state.to_record() == expected
        fill(store, 3)
        store.append(ConsumerSeen("lake", 3 * turn, 100.0))
        expected = store.state.to_record()
        store.close()
        leader.resign()
        with pytest.raises(NotLeaderError):
            store.append(TermGiven("a", 1000 + turn))
    assert expected is not None
    # From the version on that the consumer had when the last commit was issued.
    assert expected["streams"]["a"]["past"][0][0] == 6


def test_what_a_checkpoint_contains_is_removed(settings: EtcdSettings) -> None:
    leader = lead(settings)
    store = EtcdStore(settings, leader, checkpoint_every=5)
    fill(store, 60)
    with Etcd(settings, 1.0) as client:
        keys = [each.key for each in client.scan(settings.prefix, within=5.0)]
    assert len([key for key in keys if "/record/" in key]) < 5
    assert len([key for key in keys if "/commits/a/" in key]) < 5
    assert stored(settings, leader) == store.state.to_record()
    store.close()
    leader.resign()


def test_a_leader_that_never_looks_at_its_clock_cannot_write(
    settings: EtcdSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fence needs no clock: here the old leader takes itself for one forever."""
    leader = lead(settings)
    old = EtcdStore(settings, leader)
    for record in (Created("log"), StreamCreated("s", ("a",)), TermGiven("s", 1)):
        old.append(record)
    known = old.state.to_record()
    leader.resign()
    other = lead(settings)
    new = EtcdStore(settings, other)
    monkeypatch.setattr(leader, "check", lambda: None)
    for write in (partial(old.append, TermGiven("s", 2)), old.checkpoint):
        with pytest.raises(UnavailableError):
            write()
        new.reload()
        assert new.state.to_record() == known
    new.append(TermGiven("s", 3))
    new.close()
    old.close()
    other.resign()


class LossyEtcd(Etcd):
    """A transaction may be performed twice, or late, or its answer is lost."""

    choose = random.Random(0)
    late: list[Mapping[str, Any]] = []  # noqa: RUF012  # set by the test
    #: How often a transaction is performed, performed twice, unanswered, late.
    weights = (6, 1, 1, 1)

    def txn(self, txn: Mapping[str, Any], *, within: float) -> dict[str, Any]:
        if self.late and self.choose.random() < 0.4:
            super().txn(self.late.pop(self.choose.randrange(len(self.late))), within=within)
        fate = self.choose.choices(("well", "twice", "lost", "late"), self.weights)[0]
        if fate == "late":
            self.late.append(txn)
            raise UnavailableError("no answer")
        answer = super().txn(txn, within=within)
        if fate == "twice":
            answer = super().txn(txn, within=within)
        if fate == "lost":
            raise UnavailableError("no answer")
        return answer


def test_a_write_that_was_sent_again_succeeded(
    settings: EtcdSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LossyEtcd, "weights", (0, 1, 0, 0))
    monkeypatch.setattr(etcd_store, "Etcd", LossyEtcd)
    leader = lead(settings)
    store = EtcdStore(settings, leader, checkpoint_every=5)
    fill(store, 10)
    assert stored(settings, leader) == store.state.to_record()
    store.close()
    leader.resign()


def test_what_was_acknowledged_is_there_whichever_writes_are_lost_late_or_doubled(
    settings: EtcdSettings, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LossyEtcd, "choose", random.Random(seed))
    monkeypatch.setattr(LossyEtcd, "late", [])
    leader = lead(settings)
    plain = EtcdStore(settings, leader)
    fill(plain, 1)
    plain.close()
    with monkeypatch.context() as patch:
        patch.setattr(etcd_store, "Etcd", LossyEtcd)
        store = EtcdStore(settings, leader, checkpoint_every=5)
    term = refused = 0
    for number in range(250):
        try:
            term += 1
            store.append(TermGiven("a", term))
            acknowledged = term
            if number % 3 == 0:
                fill(store, 1)
            if number % 20 == 0:
                store.append(ConsumerSeen("lake", store.state.version - 3, 100.0))
        except UnavailableError:
            refused += 1
            continue
        assert store.state.streams["a"].term == acknowledged
        if number % 4 == 0:
            assert stored(settings, leader) == store.state.to_record()
    assert refused > 25
    assert store.state.version > 30
    store.close()
    leader.resign()


def test_a_leader_renews_its_leadership_and_never_binds_it_to_an_older_lease(
    settings: EtcdSettings, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LossyEtcd, "choose", random.Random(seed))
    monkeypatch.setattr(LossyEtcd, "late", [])
    monkeypatch.setattr(LossyEtcd, "weights", (1, 0, 0, 0))
    monkeypatch.setattr(leader_lease, "Etcd", LossyEtcd)
    granted: list[int] = []
    really = leader_lease._grant

    def grant(client: Etcd, seconds: float, within: float) -> leader_lease._Lease:
        lease = really(client, 60.0, within)
        granted.append(lease.number)
        return lease

    monkeypatch.setattr(leader_lease, "_grant", grant)
    leader = lead(settings)
    monkeypatch.setattr(LossyEtcd, "weights", (4, 0, 1, 3))
    confirmed = renewals = 0
    with Etcd(settings, 1.0) as client:
        for _ in range(150):
            until = leader._its.until
            with contextlib.suppress(UnavailableError):
                leader._renew()
            if leader._its.until > until:
                renewals, confirmed = renewals + 1, len(granted) - 1
            found = client.get(leader.key, within=5.0)
            assert found is not None
            assert found.created == leader.fence
            assert granted.index(found.lease) >= confirmed
    assert renewals > 30
    assert not leader.lost.is_set()
    monkeypatch.setattr(LossyEtcd, "weights", (1, 0, 0, 0))
    leader.resign()
    another = try_to_lead(settings, "127.0.0.1:2")
    assert isinstance(another, Leader)
    assert try_to_lead(settings, "127.0.0.1:1") == "127.0.0.1:2"
    another.resign()


def test_25_a_hindered_leader_gives_way_to_who_could_work_and_to_nobody_else(
    settings: EtcdSettings,
) -> None:
    """It resigns before the other one leads; until a candidate asks for the lead, it goes on."""
    leader = lead(settings)

    def look(number: int, *, able: bool) -> Leader | str:
        return try_to_lead(settings, f"127.0.0.1:{number}", able=lambda: able)

    assert look(2, able=True) == "127.0.0.1:1"
    leader._renew()
    leader.hindered = True
    for _ in range(2):
        leader._renew()
        assert look(2, able=False) == "127.0.0.1:1"
    assert not leader.lost.is_set(), "nobody would replace it"
    assert look(3, able=True) == look(2, able=True) == "127.0.0.1:1"
    leader.hindered = False
    leader._renew()
    assert not leader.lost.is_set(), "it works again"
    leader.hindered = True
    leader._renew()
    assert leader.lost.is_set()
    assert look(3, able=True) == "127.0.0.1:1", "it has not ended"
    leader.resign()
    assert look(2, able=True) == look(1, able=False) == "127.0.0.1:3", "which asked first"
    successor = look(3, able=True)
    assert isinstance(successor, Leader)
    assert successor.fence > leader.fence
    # Its own request is no other one's.
    successor.hindered = True
    successor._renew()
    assert not successor.lost.is_set()
    successor.resign()


@pytest.mark.parametrize(
    ("key", "change", "error"),
    [
        ("checkpoint", lambda value: value.replace(b"log", b"lag"), CorruptError),
        ("record/00000000000000000009", lambda value: value[:-2], CorruptError),
        ("record/00000000000000000012", lambda value: value, CorruptError),
        ("format", lambda _: b"2", NotSupportedError),
    ],
)
def test_what_is_not_as_it_was_written_is_named(
    settings: EtcdSettings, key: str, change: Any, error: type[Exception]
) -> None:
    leader = lead(settings)
    store = EtcdStore(settings, leader, checkpoint_every=8)
    fill(store, 1)
    for term in range(1, 6):
        store.append(TermGiven("a", term))
    store.close()
    with Etcd(settings, 1.0) as client:
        name = f"{settings.prefix}{key}"
        found = client.get(name, within=5.0) or client.get(
            f"{settings.prefix}record/00000000000000000009", within=5.0
        )
        assert found is not None
        client.txn({"success": [put(name, change(found.value))]}, within=5.0)
    with pytest.raises(error) as raised:
        EtcdStore(settings, leader)
    assert ("`tuskline log rebuild`" in str(raised.value)) == (error is CorruptError)
    assert settings.prefix in str(raised.value)
    leader.resign()
