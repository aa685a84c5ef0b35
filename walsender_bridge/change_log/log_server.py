"""The log server's process for replicas: `python -m walsender_bridge.change_log.log_server`.

It ends with its supervisor, and on SIGTERM or SIGINT. Either way no acknowledged entry is lost:
entries are on disk before they are acknowledged.
"""

import argparse
import os
import signal
import sys
import threading
from pathlib import Path

from walsender_bridge.change_log.replica.service import ReplicaServer
from walsender_bridge.change_log.storage.store import SEGMENT_BYTES
from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime import logs, malloc_trim, supervisor

__all__ = ["ReplicaServer", "main"]


def main() -> None:
    """Serve the replicas of one data directory until a signal stops the process."""
    supervisor.exit_with_parent()
    logs.configure()
    malloc_trim.start()
    parser = argparse.ArgumentParser(prog="tuskline-log-server", description=main.__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--listen", required=True, help="host:port")
    parser.add_argument("--segment-bytes", type=int, default=SEGMENT_BYTES)
    arguments = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        server = ReplicaServer(
            arguments.data_dir,
            arguments.listen,
            segment_bytes=arguments.segment_bytes,
            after=supervisor.last_signal(),
        )
    except TusklineError as error:
        logs.say_error(error)
        sys.exit(int(error.cause))
    stop.wait()
    server.stop()
    # Open calls would keep the interpreter running; there is nothing left to do for them.
    os._exit(0)


if __name__ == "__main__":
    main()
