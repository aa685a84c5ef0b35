"""A log server whose data_dir is put back to an older state, as with its virtual machine."""

import shutil

from tests.support.log_entries import SCHEMAS
from tests.support.waiting import wait_for
from tests.unit.test_replication import machines

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
