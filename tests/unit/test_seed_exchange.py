"""The exchange of Varlog's RFC between two replicas and the repository: each report, each commit, each stored context."""

from tests.support.log_entries import HASHES, SCHEMAS, EntryMaker
from walsender_bridge.change_log.protocol import CommitContext, ReplicaReport
from walsender_bridge.change_log.replica.core import Replica, ReplicaState
from walsender_bridge.change_log.replica.disk import Durable, Effect, PutDurable, StoredReplica
from walsender_bridge.change_log.repository.core import (
    Created,
    Repository,
    RepositoryTick,
    StreamCreated,
)

FOREVER = 2**64 - 1


class LogStream:
    """A stream with its one replica, and what is on that replica's disk of its state."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.make = EntryMaker(seed)
        self.stored = Durable(name, "log")
        self.replica = Replica(StoredReplica(self.stored, None, None, None), (), ())
        self.take(self.replica.open_writer(1))

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, PutDurable):
                self.stored = effect.durable

    def write(self) -> None:
        entry = self.make.whole()
        self.take(self.replica.append([entry], list(SCHEMAS.values()), None, FOREVER))

    def report(self) -> ReplicaReport:
        found = self.replica.report("k")
        assert found is not None
        return found

    def commit(self, repository: Repository) -> list[CommitContext]:
        """What the repository sends it, and it stores."""
        sent = repository.streams[self.name].missed(self.report().version)
        for each in sent:
            self.take(self.replica.commit(each.context, crc=each.crc))
        self.take(self.replica.persist())
        return [each.context for each in sent]


def fields(report: ReplicaReport) -> tuple[int, int, int]:
    return report.version, report.local_offset, report.length


def test_0_each_message_and_each_stored_context_has_the_figures_of_the_rfc() -> None:
    one, two = LogStream("ls1", 1), LogStream("ls2", 2)
    repository = Repository()
    # Offsets are given in the order of names, whichever was created first.
    for record in (Created("log"), StreamCreated("ls2", ("k",)), StreamCreated("ls1", ("k",))):
        repository.apply(record)
    one.write()
    two.write()
    first = (one.report(), two.report())
    assert [fields(each) for each in first] == [(0, 1, 1), (0, 1, 1)]  # 1, 2
    assert repository.apply(RepositoryTick(0.0, first))
    two.write()
    assert one.commit(repository) == [CommitContext(1, 1, 1, 1)]  # 3
    assert two.commit(repository) == [CommitContext(1, 1, 2, 1)]  # 4
    assert one.stored.context == CommitContext(version=1, local_offset=1, global_offset=1, length=1)
    second = (one.report(), two.report())
    assert [fields(each) for each in second] == [(1, 2, 0), (1, 2, 1)]  # 5, 6
    assert repository.apply(RepositoryTick(0.0, second))
    assert one.commit(repository) == [CommitContext(2, 2, 3, 0)]  # 7
    assert two.commit(repository) == [CommitContext(2, 2, 3, 1)]  # 8
    # The empty one takes the place of the one before.
    assert one.stored.context == CommitContext(version=2, local_offset=2, global_offset=3, length=0)
    assert [fields(each.report()) for each in (one, two)] == [(2, 2, 0), (2, 3, 0)]
    # "local_offset + length must be equal to the position of the following log entry", after a restart, too.
    again = Replica(StoredReplica(one.stored, 1, 1, 2), (), HASHES.values())
    assert again.state == ReplicaState.APPENDABLE
    found = again.report("k")
    assert found is not None
    assert fields(found) == (2, 2, 0)
