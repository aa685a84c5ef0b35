"""`python -m walsender_bridge.quorum.safekeeper`: one safekeeper's hot loop; the log server's supervisor starts it.

It ends with its supervisor, and on SIGTERM or SIGINT. The exit code is the error's cause.
"""

import signal
import sys
from functools import partial

from walsender_bridge.errors import TusklineError
from walsender_bridge.quorum.safekeeper import data_dir
from walsender_bridge.quorum.safekeeper.driver import SafekeeperDriver
from walsender_bridge.quorum.safekeeper.settings import SafekeeperSettings
from walsender_bridge.quorum.safekeeper.status import Tell, tell_nobody
from walsender_bridge.quorum.safekeeper.status_record import EndedSafekeeper
from walsender_bridge.runtime import child_process, gc_control, status_file
from walsender_bridge.runtime.error_record import ErrorRecord


def keep_wal(settings: SafekeeperSettings) -> None:
    """Run until a signal."""
    path = settings.status_file
    tell = tell_nobody if path is None else partial(status_file.write, path)
    try:
        with child_process.disk_errors():
            _run(settings, tell)
    except TusklineError as error:
        if path is not None:
            status_file.write(path, EndedSafekeeper(error=ErrorRecord.of(error)))
        raise


def _run(settings: SafekeeperSettings, tell: Tell) -> None:
    with data_dir.held(settings.data_dir) as holding:
        driver = SafekeeperDriver(settings, tell=tell, still_held=holding.check)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: driver.stop())
        # All objects allocated so far live as long as the process, and the loop creates no cycles.
        gc_control.disable_automatic()
        driver.run()


if __name__ == "__main__":
    sys.exit(child_process.run(SafekeeperSettings, keep_wal))
