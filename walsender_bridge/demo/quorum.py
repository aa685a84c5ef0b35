"""The demo's safekeepers: makes commits wait for them, shows their state, and compares their WAL at the end."""

import time
from pathlib import Path
from typing import Any

from walsender_bridge.config import load_config
from walsender_bridge.demo.local_server import free_ports
from walsender_bridge.demo.view import Progress
from walsender_bridge.errors import DeadlineError, TusklineError
from walsender_bridge.observability import quorum_view
from walsender_bridge.observability.safekeeper_verify import hosted_places, run
from walsender_bridge.postgres.protocol.lsn import format_lsn, parse_lsn
from walsender_bridge.provisioning import quorum as server
from walsender_bridge.provisioning.configured import needed_quorum
from walsender_bridge.quorum.safekeeper.storage.reader import WalReader
from walsender_bridge.runtime.output import Output

#: Seconds within which a quorum has to answer, and the last safekeeper has to have all WAL.
_QUORUM_SECONDS = 60.0


def section(safekeepers: int) -> list[str]:
    """The section `[safekeepers]` for this number on this machine."""
    first, *_ = free_ports(2 * safekeepers)
    return [
        "[safekeepers]",
        f"local = {safekeepers}",
        f'listen = "127.0.0.1:{first}"',
        f'wal_listen = "127.0.0.1:{first + safekeepers}"',
        # All WAL is compared at the end.
        f"keep_bytes = {1 << 30}",
        "",
    ]


class DemoQuorum:
    """The quorum of the configuration at `config`, whose parts run."""

    def __init__(self, config: Path) -> None:
        self._settings = load_config(config)
        self._wanted = needed_quorum(self._settings)

    def require(self) -> None:
        """Make COMMIT wait for the quorum, as `tuskline quorum require` does. Raises a `TusklineError`."""
        with server.session(self._wanted) as connection:
            server.require_quorum(connection, self._wanted, timeout=_QUORUM_SECONDS)

    def poll(self, progress: Progress) -> None:
        """Put the state of the quorum into `progress`."""
        seen = quorum_view.observe(self._settings)
        if seen is not None:
            progress.quorum = {
                "commit": "-" if seen.proposer is None else seen.proposer.commit_lsn,
                **{each.name: f"{each.state} {each.flush_lsn or '-'}" for each in seen.safekeepers},
            }

    def settle(self) -> dict[str, Any]:
        """Wait until every safekeeper has all that was committed. Raises `DeadlineError`."""
        deadline = time.monotonic() + _QUORUM_SECONDS
        while True:
            try:
                with server.session(self._wanted) as connection:
                    connection.execute("SELECT pg_switch_wal()")
                    server.wait_for_quorum(connection, self._wanted, _QUORUM_SECONDS)
                    wanted = server.facts(connection, self._wanted)["quorum_lsn"]
                break
            except TusklineError:
                # The part that was killed last may still be starting.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        while True:
            seen = quorum_view.observe(self._settings)
            assert seen is not None
            behind = [
                each.name
                for each in seen.safekeepers
                if each.state != "streaming" or parse_lsn(each.flush_lsn or "0/0") < wanted
            ]
            if not behind:
                return {
                    "safekeepers": len(seen.safekeepers),
                    "quorum_commit_lsn": format_lsn(wanted),
                    "quorum_term": seen.session and seen.session.term,
                }
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{', '.join(behind)} did not catch up to {format_lsn(wanted)}",
                    repair="see log-server.log and bridge.log",
                )
            time.sleep(0.2)

    def compare(self, output: Output) -> dict[str, Any]:
        """Read all WAL of the safekeepers, which have ended, and compare it byte for byte."""
        places = hosted_places(self._settings)
        report = run(places, output)
        for error in report.errors:
            output.note(str(error))
        size = 16 << 20  # the default of initdb
        held = [WalReader(place.data_dir / "wal", size).complete() for place, _ in places]
        names = set.intersection(*(set(each) for each in held))
        return {
            "segments_compared": len(names),
            "segments_equal": not report.errors
            and all(len({each[name].read_bytes() for each in held}) == 1 for name in names),
            "wal_compared_bytes": report.record["compared_bytes"],
        }
