"""The WAL server of one safekeeper as a process: `python -m walsender_bridge.quorum.wal_server`.

It ends with its supervisor, and on SIGTERM or SIGINT; readers then reconnect, to this server or another.
"""

import asyncio
import gc
import sys

from walsender_bridge.quorum.wal_server.service import WalServer
from walsender_bridge.quorum.wal_server.settings import WalServerSettings
from walsender_bridge.runtime import child_process, supervisor


def serve(settings: WalServerSettings) -> None:
    """Serve the WAL of one safekeeper until a signal."""
    with child_process.disk_errors():
        asyncio.run(_serve(settings))


async def _serve(settings: WalServerSettings) -> None:
    stop = asyncio.Event()
    supervisor.stop_on_signals(stop)
    server = WalServer(settings)
    # All objects allocated so far live as long as the process.
    gc.freeze()
    await server.run(stop)


if __name__ == "__main__":
    sys.exit(child_process.run(WalServerSettings, serve))
