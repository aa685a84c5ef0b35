"""A safekeeper that began anew is brought the older WAL that the others keep, and serves it to real clients."""

import shutil

from tests.support.quorum_stack import QuorumStack, load_server
from tests.support.waiting import wait_for
from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.postgres.protocol.wal_page import parse_segment_name, segment_name
from walsender_bridge.quorum.proposer.change_members import ProposerFiles, change, wait

SEGMENT = 1 << 20
KEEP = {"keep_bytes": 1 << 30}


def start(name: str) -> int:
    found = parse_segment_name(name, SEGMENT)
    assert found is not None
    return found[1]


def test_39_a_rebuilt_safekeeper_is_brought_the_older_wal_and_serves_it(
    tmp_path, make_server, receive
):
    primary = load_server(make_server, small=True, wal_level="replica", wal_keep_size="256MB")
    with QuorumStack(tmp_path, primary) as quorum:
        quorum.options = dict.fromkeys(quorum.names, KEEP)
        quorum.start()
        quorum.attach()

        def switch(*numbers: int) -> None:
            for number in numbers:
                quorum.insert(number)
                quorum.ask("SELECT pg_switch_wal()")

        switch(1, 2, 3, 4)
        last = parse_lsn(quorum.flush_lsn()) // SEGMENT * SEGMENT
        wait_for(lambda: parse_lsn(quorum.status()["restart_lsn"]) >= last, 20, "all have it")
        oldest = min(quorum.segments(0))

        # Behind the switch, where no record shows it. The proposer asks this one first.
        damaged = sorted(quorum.segments(0))[1]
        with (quorum.data(0) / "wal" / damaged).open("r+b") as file:
            file.seek(SEGMENT - 5000)
            file.write(b"DAMAGE")

        # Its disk is lost. It begins where the others' WAL is retained for laggards, and so far it is to keep nothing else.
        quorum.kill("safekeeper-2")
        shutil.rmtree(quorum.data(2))
        quorum.options["safekeeper-2"] = {}
        quorum.start("safekeeper-2")
        files, address = ProposerFiles(quorum.status_file, quorum.members_file), quorum.address(2)
        wait_for(lambda: quorum.listens(2), 20, "it listens")
        wait(files, change(files, add=[address], remove=[address]), 30)
        switch(5)
        whole = wait_for(lambda: quorum.segments(2), 20, "it has a whole segment")
        assert start(min(whole)) >= last

        with quorum.wal_server(2) as server:
            folder = tmp_path / "received"
            folder.mkdir()
            shutil.copyfile(quorum.data(0) / "wal" / oldest, folder / oldest)
            needed = segment_name(1, start(oldest) + SEGMENT, SEGMENT)
            refused = receive(primary, server.dsn(), folder, "--no-loop")
            refused.process.wait(20)
            word = f"requested WAL segment {needed} has already been removed"
            assert word in refused.log_file.read_text()

            # What a reader was refused is needed here: it is brought, and the reader is served.
            first = receive(primary, server.dsn(), folder)
            # A segment that is renamed while they are listed is in no place for a moment.
            begun = min(wait_for(lambda: quorum.segments(2), 20, "it has a whole segment"))
            wait_for((folder / begun).exists, 40, f"it is served: {quorum.logs()}")
            # Once it has been served, it may be gone again.
            assert (folder / needed).exists()
            assert oldest not in quorum.segments(2)
            first.stop()

            quorum.kill("safekeeper-2")
            quorum.options["safekeeper-2"] = KEEP
            quorum.start("safekeeper-2")
            wait_for(
                lambda: quorum.segments(2).keys() >= quorum.segments(0).keys(),
                30,
                f"it has the older WAL, too: {quorum.logs()}",
            )
            switch(6)  # and commits go on

            received = receive(primary, server.dsn(), folder, "--no-loop")
            newest = max(quorum.segments(0))
            wait_for(
                (folder / newest).exists,
                30,
                f"a client has it all: {received.log_file.read_text()}",
            )
            assert quorum.segments(0)[damaged] != quorum.segments(1)[damaged]
            for name, content in quorum.segments(1).items():
                assert (folder / name).read_bytes() == content, name
                assert quorum.segments(2)[name] == content, name
