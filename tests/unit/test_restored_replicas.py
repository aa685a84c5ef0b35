"""A log server whose data_dir is put back to an older state, as with its virtual machine, or is that of another log."""

import shutil

from tests.support.log_entries import SCHEMAS
from tests.support.waiting import wait_for
from tests.unit.test_replication import STREAM, machines
from walsender_bridge.change_log import log_server_messages as m
from walsender_bridge.change_log.client import ReplicaClient
from walsender_bridge.errors import UnavailableError
from walsender_bridge.observability import log_view

__all__ = ["machines"]


def test_21_an_older_copy_of_a_member_takes_no_commit_for_a_removed_tail(machines) -> None:
    here = machines()
    here.write_on(2)
    # With it, the repository keeps the commits that an older replica lacks.
    here.log.register_consumer("slow", None, 3600.0)
    with here.open_writer() as writer:
        writer.send([here.make.whole(size=77)], schemas=list(SCHEMAS.values()), gate_lsn=0)
        assert writer.next_ack(20) is not None
    place, older = here.folder / "log-server-2", here.folder / "older"
    shutil.copytree(place, older)
    # The next writer's seal removes that entry; another one gets its offset.
    here.write_on()
    here.wipe(2)
    older.rename(place)
    here.start(2)
    wait_for(lambda: len(here.repository._log_servers.with_own_id()) == 3, 20, "it answers")
    with here.open_writer():
        assert here.members() == [0, 1]
    here.write_on()
    here.all_equal()


def test_21_an_older_copy_of_a_member_takes_no_commit_that_is_meant_for_other_entries(
    machines, monkeypatch
) -> None:
    """It has reported no version since it was copied, and has other entries at the offsets of the commit that is on its way."""
    here = machines()
    here.write_on(2)
    with here.open_writer() as writer:
        writer.send([here.make.whole(size=77)], schemas=list(SCHEMAS.values()), gate_lsn=0)
        assert writer.next_ack(20) is not None
    place, older = here.folder / "log-server-2", here.folder / "older"
    shutil.copytree(place, older)
    held = here.server(2).replica(STREAM)
    version = held.status().version

    def refuse(*_: object) -> None:
        raise UnavailableError("the commit is on its way")

    monkeypatch.setattr(held, "commit", refuse)
    with here.open_writer() as writer:
        writer.send([here.make.whole(size=77)], schemas=list(SCHEMAS.values()))
        assert writer.next_ack(20) is not None

        def issued() -> int:
            """The state may be replaced by another object meanwhile."""
            end: int = here.repository._state.streams[STREAM].last.context.end
            return end

        wait_for(lambda: issued() == 4, 20, "the commit is issued")
        assert held.status().version == version
        here.wipe(2)
        older.rename(place)
        here.start(2)
        wait_for(lambda: len(here.repository._log_servers.with_own_id()) == 3, 20, "it answers")
    here.write_on()
    here.all_equal()


def test_a_replica_of_another_log_is_shown_with_the_reason_until_it_is_removed(machines) -> None:
    here = machines(silence=1.0)
    here.write_on()
    here.wipe(2)
    here.start(2)
    with ReplicaClient(here.listens[2]) as other:
        other._call(m.CREATE, m.CreateRequest(STREAM, "another log"))

    def reason() -> str:
        (stream,) = log_view.summary(log_view.observe(here.repository.address))["streams"]
        shown = {each["address"]: each["reason"] for each in stream["replicas"]}
        return shown.get(f"grpc://{here.listens[2]}") or ""

    wait_for(lambda: "not of log another log" in reason(), 30, "the reason")
    here.wipe(2)
    here.start(2)
    here.write_on()
    here.all_equal()
    assert reason() == ""
