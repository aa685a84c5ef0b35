"""The metadata repository as a process of its own, which a test may kill. Streams are on all log servers, and go on without one.

python -m tests.support.repository_process DATA_DIR LISTEN RETENTION LOG_SERVER...
"""

import sys
import threading
from pathlib import Path

from walsender_bridge.change_log.repository.membership import ReplicationPolicy
from walsender_bridge.change_log.repository.service import RepositoryServer
from walsender_bridge.runtime import supervisor

if __name__ == "__main__":
    supervisor.exit_with_parent()
    data_dir, listen, retention, *log_servers = sys.argv[1:]
    number = len(log_servers)
    server = RepositoryServer(
        Path(data_dir),
        listen,
        log_servers=log_servers,
        retention=float(retention),
        replication=ReplicationPolicy(number, max(1, number - 1), silence=2.0),
    )
    server.start()
    threading.Event().wait()
