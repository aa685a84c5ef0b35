"""`python -m walsender_bridge.capture`: one capture process; the bridge's supervisor starts it.

The DSN is passed in the environment variable TUSKLINE_SOURCE_DSN, since every user can read a process's arguments;
the password can also come from `.pgpass`, PGPASSWORD or a service file. The exit code is that of the error's
cause. SIGTERM and SIGINT stop the process after the current step.
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Never

from walsender_bridge.capture import core
from walsender_bridge.capture.driver import Capture
from walsender_bridge.capture.gate.core import Rule
from walsender_bridge.capture.gate.monitor import GateMonitor, OpenGate, ServerGate
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.capture.spool.core import LIMIT_BYTES
from walsender_bridge.errors import Cause, TusklineError, UsageError
from walsender_bridge.runtime import logs
from walsender_bridge.runtime.supervisor import exit_with_parent

DSN_VARIABLE = "TUSKLINE_SOURCE_DSN"


def main(arguments: list[str]) -> int:
    """Run until a signal arrives, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m walsender_bridge.capture")
    parser.add_argument("--source", required=True, help="name of the log stream")
    parser.add_argument("--slot", required=True)
    parser.add_argument("--publication", required=True)
    parser.add_argument("--log", required=True, help="address of the metadata repository")
    parser.add_argument(
        "--table", action="append", default=[], help="schema.table; can be given more than once"
    )
    parser.add_argument(
        "--status-file", type=Path, help="write positions and state to this file (JSON)"
    )
    parser.add_argument("--spool", required=True, type=Path, help="folder for large transactions")
    parser.add_argument(
        "--spool-limit", type=int, default=LIMIT_BYTES, help="bytes; 0 disables the spool"
    )
    parser.add_argument(
        "--max-uncommitted-bytes", type=int, default=core.MAX_UNCOMMITTED_BYTES, help="bytes of WAL"
    )
    gate = parser.add_argument_group("the commit gate (capture/gate/core.py)")
    gate.add_argument(
        "--candidate",
        action="append",
        default=[],
        help="physical slot; can be given more than once",
    )
    gate.add_argument(
        "--members", action="store_true", help="treat the server itself as one of the candidates"
    )
    gate.add_argument(
        "--gate-quorum", type=int, default=0, help="number of candidates required; 0 means all"
    )
    gate.add_argument("--on-missing", choices=("block", "degrade"), default="block")
    gate.add_argument("--degrade-after", type=float, default=60.0, help="seconds")
    gate.add_argument("--gate-record", type=Path, help="file that records the gate's decisions")
    gate.add_argument("--commit-page", type=Path, help="also wait for the quorum of safekeepers")
    given = parser.parse_args(arguments)
    dsn = os.environ.pop(DSN_VARIABLE, None)
    if dsn is None:
        sys.stderr.write(f"environment variable {DSN_VARIABLE} is not set\n")
        return Cause.USAGE
    source = CaptureSource(given.source, dsn, given.slot, given.publication, tuple(given.table))
    try:
        capture = Capture(
            source,
            log=given.log,
            gate=_gate(given),
            spool=given.spool,
            spool_limit=given.spool_limit,
            max_uncommitted_bytes=given.max_uncommitted_bytes,
            status_file=given.status_file,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: capture.stop())
        capture.run()
    except TusklineError as error:
        logs.say_error(error)
        return error.cause
    return 0


def _gate(given: argparse.Namespace) -> GateMonitor:
    rule = Rule(
        tuple(given.candidate),
        given.members,
        given.gate_quorum,
        given.on_missing,
        given.degrade_after,
        safekeepers=given.commit_page is not None,
    )
    if not rule.holds:
        return OpenGate()
    if given.gate_record is None:
        raise UsageError("a commit gate needs --gate-record", repair="add --gate-record FILE")
    return ServerGate(rule, given.gate_record, given.commit_page)


def _exit(code: int) -> Never:
    """Exit without waiting for threads that a hung log server may block."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_with_parent()
    logs.configure()
    _exit(main(sys.argv[1:]))
