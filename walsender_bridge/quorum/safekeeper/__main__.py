"""`python -m walsender_bridge.quorum.safekeeper`: one safekeeper's hot loop; the log server's supervisor starts it.

It ends with its supervisor, and on SIGTERM or SIGINT. The exit code is the error's cause.
"""

import argparse
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from walsender_bridge.errors import Cause, TusklineError, UsageError
from walsender_bridge.quorum.safekeeper import data_dir
from walsender_bridge.quorum.safekeeper.driver import SafekeeperDriver
from walsender_bridge.quorum.safekeeper.settings import SafekeeperSettings
from walsender_bridge.quorum.safekeeper.status import Tell, tell_nobody
from walsender_bridge.quorum.safekeeper.status_record import EndedSafekeeper
from walsender_bridge.quorum.safekeeper.storage.segments import StorageLimits
from walsender_bridge.runtime import gc_control, logs, status_file, supervisor
from walsender_bridge.runtime.status_file import ErrorRecord


def main(arguments: list[str]) -> int:
    """Run until a signal; the exit code."""
    supervisor.exit_with_parent()
    logs.configure()
    parser = argparse.ArgumentParser(prog="python -m walsender_bridge.quorum.safekeeper")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--listen", required=True, help="listen for proposers on host:port")
    parser.add_argument(
        "--positions", type=Path, required=True, help="publish positions on this page"
    )
    parser.add_argument("--wal-bytes", type=int, help="limit the disk space of its WAL")
    parser.add_argument("--free-bytes", type=int, help="keep this much free on its disk")
    parser.add_argument("--status-file", type=Path, help="write the status to this file (JSON)")
    parser.add_argument(
        "--keep-bytes", type=int, default=0, help="keep this much WAL that is not needed"
    )
    parser.add_argument(
        "--max-slot-wal-keep-size",
        type=int,
        help="limit the WAL kept for slots and archive, in bytes",
    )
    parser.add_argument("--archive", help="keep WAL until it is in this archive (URL)")
    given = parser.parse_args(arguments)
    try:
        host, _, port = given.listen.rpartition(":")
        if not host or not port.isdecimal():
            raise UsageError(f"--listen {given.listen}", repair="write host:port")
        settings = SafekeeperSettings(
            data_dir=given.data_dir,
            host=host.strip("[]"),
            port=int(port),
            positions=given.positions,
            limits=_limits(given),
            keep_bytes=given.keep_bytes,
            archive=given.archive,
            max_slot_wal_keep_size=given.max_slot_wal_keep_size,
            tell=_tell(given.status_file),
        )
        with data_dir.held(given.data_dir) as holding:
            _run(replace(settings, still_held=holding.check))
    except TusklineError as error:
        logs.say_error(error)
        if given.status_file is not None:
            status_file.write(given.status_file, EndedSafekeeper(error=ErrorRecord.of(error)))
        return error.cause
    except OSError as error:
        logs.say(f"the disk failed: {error}\n")
        return Cause.INTERNAL
    return 0


def _run(settings: SafekeeperSettings) -> None:
    driver = SafekeeperDriver(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: driver.stop())
    # All objects allocated so far live as long as the process, and the loop creates no cycles.
    gc_control.disable_automatic()
    driver.run()


def _limits(given: argparse.Namespace) -> StorageLimits:
    limits = StorageLimits(wal_bytes=given.wal_bytes)
    return limits if given.free_bytes is None else replace(limits, free_bytes=given.free_bytes)


def _tell(path: Path | None) -> Tell:
    return tell_nobody if path is None else partial(status_file.write, path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
