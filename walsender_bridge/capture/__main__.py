"""`python -m walsender_bridge.capture`: one capture process; the bridge's supervisor starts it.

The DSN comes in the environment variable TUSKLINE_SOURCE_DSN, since arguments are everybody's to read;
a password may as well come from `.pgpass`, PGPASSWORD or a service file. The exit code is the error's
cause. SIGTERM and SIGINT end it after the step at hand.
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Never

from walsender_bridge import logs
from walsender_bridge.capture.driver import Capture
from walsender_bridge.capture.source import Source
from walsender_bridge.capture.spool import LIMIT_BYTES
from walsender_bridge.errors import Cause, TusklineError
from walsender_bridge.gate import OpenGate
from walsender_bridge.supervisor import exit_with_parent

DSN_VARIABLE = "TUSKLINE_SOURCE_DSN"


def main(arguments: list[str]) -> int:
    """Run until a signal; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m walsender_bridge.capture")
    parser.add_argument("--source", required=True, help="the log stream's name")
    parser.add_argument("--slot", required=True)
    parser.add_argument("--publication", required=True)
    parser.add_argument("--log", required=True, help="the metadata repository's address")
    parser.add_argument("--table", action="append", default=[], help="schema.table, repeated")
    parser.add_argument("--status-file", type=Path, help="where to say how far it is (JSON)")
    parser.add_argument("--spool", required=True, type=Path, help="a folder for large transactions")
    parser.add_argument("--spool-limit", type=int, default=LIMIT_BYTES, help="bytes; 0: no spool")
    given = parser.parse_args(arguments)
    dsn = os.environ.pop(DSN_VARIABLE, None)
    if dsn is None:
        sys.stderr.write(f"{DSN_VARIABLE} is not set\n")
        return Cause.USAGE
    source = Source(given.source, dsn, given.slot, given.publication, tuple(given.table))
    capture = Capture(
        source,
        log=given.log,
        gate=OpenGate(),
        spool=given.spool,
        spool_limit=given.spool_limit,
        status_file=given.status_file,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: capture.stop())
    try:
        capture.run()
    except TusklineError as error:
        logs.say_error(error)
        return error.cause
    return 0


def _exit(code: int) -> Never:
    """End without waiting for threads that a hung keeper may hold."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_with_parent()
    logs.configure()
    _exit(main(sys.argv[1:]))
