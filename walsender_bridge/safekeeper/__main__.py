"""`python -m walsender_bridge.safekeeper`: one safekeeper's hot loop; the keeper's supervisor starts it.

It ends with its supervisor, and on SIGTERM or SIGINT. The exit code is the error's cause.
"""

import argparse
import signal
import sys
from pathlib import Path

from walsender_bridge import garbage, logs, supervisor
from walsender_bridge.errors import Cause, TusklineError, UsageError
from walsender_bridge.safekeeper.driver import SafekeeperDriver, Settings
from walsender_bridge.safekeeper.segments import StorageLimits


def main(arguments: list[str]) -> int:
    """Run until a signal; the exit code."""
    supervisor.exit_with_parent()
    logs.configure()
    parser = argparse.ArgumentParser(prog="python -m walsender_bridge.safekeeper")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--listen", required=True, help="host:port for proposers")
    parser.add_argument("--positions", type=Path, required=True, help="the page for the WAL server")
    parser.add_argument("--wal-bytes", type=int, help="the most that its WAL may take on disk")
    parser.add_argument("--keep-bytes", type=int, default=0, help="WAL kept though nobody needs it")
    given = parser.parse_args(arguments)
    try:
        host, _, port = given.listen.rpartition(":")
        if not host or not port.isdecimal():
            raise UsageError(f"--listen {given.listen}", repair="write host:port")
        driver = SafekeeperDriver(
            Settings(
                data_dir=given.data_dir,
                host=host.strip("[]"),
                port=int(port),
                positions=given.positions,
                limits=StorageLimits(wal_bytes=given.wal_bytes),
                keep_bytes=given.keep_bytes,
            )
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: driver.stop())
        # What has been made by now lives as long as the process, and the loop makes no cycles.
        garbage.keep_quiet()
        driver.run()
    except TusklineError as error:
        logs.say_error(error)
        return error.cause
    except OSError as error:
        sys.stderr.write(f"the disk failed: {error}\n")
        return Cause.INTERNAL
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
