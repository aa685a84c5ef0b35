"""Damage in WAL that a safekeeper holds is found by its WAL server, and given to no reader."""

import json

from tests.support.quorum_stack import QuorumStack, load_server
from tests.support.waiting import wait_for

SEGMENT = 1 << 20


def test_40_a_wal_server_finds_a_damaged_segment_and_serves_the_others(
    tmp_path, make_server, receive
):
    primary = load_server(make_server, small=True, wal_level="replica")
    with QuorumStack(tmp_path, primary) as quorum:
        quorum.options = {name: {"keep_bytes": 1 << 30} for name in quorum.names}
        quorum.start()
        quorum.attach()
        numbers = iter(range(1000))

        def complete() -> bool:
            quorum.insert(next(numbers))
            quorum.ask("SELECT pg_switch_wal()")
            return len(quorum.segments(0)) >= 4

        wait_for(complete, 30, "complete segments")
        held = quorum.segments(0)
        first, damaged, third, *_ = sorted(held)
        # Behind the switch: no record's checksum covers it.
        with (quorum.data(0) / "wal" / damaged).open("r+b") as file:
            file.seek(SEGMENT - 5000)
            file.write(b"\1")
        status = tmp_path / "wal-server.json"
        with quorum.wal_server(0, status_file=status) as server:

            def found() -> list[str]:
                return json.loads(status.read_text())["damaged"] if status.exists() else []

            wait_for(lambda: found() == [damaged], 40, f"it is found: {server.log}")
            folder = tmp_path / "received"
            folder.mkdir()
            (folder / first).write_bytes(held[first])
            refused = receive(primary, server.dsn(), folder, "--no-loop")
            refused.process.wait(30)
            assert f"WAL segment {damaged} is damaged" in refused.log_file.read_text()
            assert not (folder / damaged).exists()
            # What another safekeeper has of it is whole, and from there on this one serves.
            (folder / damaged).write_bytes(held[damaged])
            (folder / f"{damaged}.partial").unlink(missing_ok=True)
            receive(primary, server.dsn(), folder, "--no-loop")
            wait_for((folder / third).exists, 30, "the next segment")
            assert (folder / third).read_bytes() == held[third]
