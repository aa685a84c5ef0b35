"""The `.history` file of a log's newest timeline, further back than the log itself reaches."""

from pathlib import Path

from walsender_bridge.postgres.protocol.lsn import WalPosition
from walsender_bridge.postgres.protocol.wal_page import WalFormat
from walsender_bridge.quorum.protocol.history import History, HistoryEntry
from walsender_bridge.quorum.protocol.timelines import history_file
from walsender_bridge.quorum.safekeeper.storage.wal import WalStorage
from walsender_bridge.runtime.folder import FolderDisk

FIRST, SECOND = b"1\t0/100\tpromotion\n", b"2\t0/200\tpromotion\n"
ALL = History((HistoryEntry(1, 50, 1), HistoryEntry(1, 0x100, 2), HistoryEntry(2, 0x200, 3)))


def test_16_what_the_server_has_left_is_told_though_the_log_began_later() -> None:
    ancestors = WalPosition(1, 0x100), WalPosition(2, 0x200)
    for history in (ALL, History(ALL.entries[1:]), History(ALL.entries[2:])):
        assert history_file(history, ancestors) == (3, FIRST + SECOND)
    assert history_file(History(ALL.entries[2:])) is None
    assert history_file(History(ALL.entries[1:])) == (3, SECOND)


def test_16_what_another_server_has_left_is_not() -> None:
    assert history_file(ALL, (WalPosition(1, 0x100), WalPosition(2, 0x201))) == (3, FIRST + SECOND)
    assert history_file(History(ALL.entries[:1]), (WalPosition(1, 0x100),)) is None


def test_16_a_history_that_was_cut_off_does_not_replace_the_whole_one(tmp_path: Path) -> None:
    storage = WalStorage(FolderDisk(tmp_path), WalFormat(16, 7, 1 << 20))
    for history in (History(ALL.entries[1:]), ALL, History(ALL.entries[1:])):
        found = history_file(history)
        assert found is not None
        storage.save_history(*found)
    assert storage.history(3) == FIRST + SECOND
    storage.save_history(3, b"1\t0/100\tpromotion\n2\t0/300\tpromotion\n")
    assert storage.history(3) != FIRST + SECOND
