"""The log server's process for replicas: `python -m walsender_bridge.change_log.log_server`.

It ends with its supervisor, and on SIGTERM or SIGINT. Either way no acknowledged entry is lost:
entries are on disk before they are acknowledged. It also ends when its data directory is removed, moved or replaced.
"""

import os
import signal
import sys
import threading
from typing import Final

from walsender_bridge.change_log.replica.settings import ReplicaServerSettings
from walsender_bridge.errors import UnavailableError
from walsender_bridge.runtime import (
    arrow_memory,
    child_process,
    logs,
    malloc_trim,
    supervisor,
    tcp_connections,
)

#: Seconds after which a signal, or the loss of the data directory, is seen at the latest.
_SIGNAL_SECONDS: Final = 0.5


def serve(settings: ReplicaServerSettings) -> None:
    """Serve the replicas of one data directory until a signal stops the process."""
    arrow_memory.limit()
    from walsender_bridge.change_log.replica.service import ReplicaServer

    malloc_trim.start()
    tcp_connections.raise_open_files()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server = ReplicaServer(
        settings.data_dir,
        settings.listen,
        segment_bytes=settings.segment_bytes,
        after=supervisor.last_signal(),
        tls=settings.tls,
        create=settings.create,
    )
    # A signal may be given to a thread of gRPC's. Then its handler runs when this thread, Python's main one, wakes up.
    try:
        while not stop.wait(_SIGNAL_SECONDS):
            server.check_directory()
    except UnavailableError as error:
        # Nothing more is written: it would not be found again.
        logs.say_error(error)
        os._exit(error.cause)
    server.stop()
    # Open calls would keep the interpreter running; there is nothing left to do for them.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(child_process.run(ReplicaServerSettings, serve))
