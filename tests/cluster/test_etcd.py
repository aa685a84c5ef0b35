"""The metadata repository on a cluster of etcd: one of several leads, and no other one can write or answer."""

from collections.abc import Iterator

import pytest

from tests.support.etcd import EtcdCluster, needs_etcd
from walsender_bridge.change_log.repository.core import (
    ConsumerSeen,
    Created,
    LogServerSeen,
    StreamCreated,
    TermGiven,
)
from walsender_bridge.change_log.repository.etcd_store import EtcdStore
from walsender_bridge.change_log.repository.leader_lease import Leader, try_to_lead
from walsender_bridge.errors import NotLeaderError

pytestmark = needs_etcd


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


def lead(etcd: EtcdCluster, prefix: str, lease: float = 2.0) -> Leader:
    found = try_to_lead(etcd.settings(lease, prefix), "127.0.0.1:1")
    assert isinstance(found, Leader)
    return found


def test_the_state_is_that_of_the_records_whoever_reads_it(etcd: EtcdCluster) -> None:
    settings, leader = etcd.settings(prefix="/one/"), lead(etcd, "/one/")
    store = EtcdStore(settings, leader, checkpoint_every=3)
    for record in (Created("log"), LogServerSeen("a", "grpc://a"), StreamCreated("s", ("a",))):
        assert store.append(record)
    for term in range(1, 6):
        store.append(TermGiven("s", term))
    known = store.state.to_record()
    store.close()
    leader.resign()
    other = lead(etcd, "/one/")
    assert other.fence > leader.fence
    again = EtcdStore(settings, other)
    assert again.state.to_record() == known
    again.append(ConsumerSeen("lake", 1, 5.0))
    with pytest.raises(NotLeaderError):
        store.append(TermGiven("s", 9))
    again.close()
    other.resign()
