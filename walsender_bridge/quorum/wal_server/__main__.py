"""The WAL server of one safekeeper as a process: `python -m walsender_bridge.quorum.wal_server`.

It ends with its supervisor, and on SIGTERM or SIGINT; readers then reconnect, to this server or another.
"""

import argparse
import asyncio
import gc
import sys
from pathlib import Path

from walsender_bridge.errors import TusklineError, UsageError
from walsender_bridge.quorum.wal_server.service import WalServer, WalServerSettings
from walsender_bridge.quorum.wal_server.stream import TIMEOUT
from walsender_bridge.quorum.wal_server.tls import TlsFiles
from walsender_bridge.runtime import logs, supervisor


def main() -> None:
    """Serve the WAL of one safekeeper until a signal."""
    supervisor.exit_with_parent()
    logs.configure()
    parser = argparse.ArgumentParser(prog="tuskline-wal-server", description=main.__doc__)
    parser.add_argument("--wal-dir", type=Path, required=True)
    parser.add_argument(
        "--positions", type=Path, required=True, help="read positions from this page"
    )
    parser.add_argument(
        "--slots", type=Path, required=True, help="keep replication slots in this file"
    )
    parser.add_argument(
        "--users",
        type=Path,
        required=True,
        help='read users from this file: lines of "name" "SCRAM-SHA-256$..."',
    )
    parser.add_argument("--listen", required=True, help="host:port")
    parser.add_argument("--tls-cert", type=Path)
    parser.add_argument("--tls-key", type=Path)
    parser.add_argument("--tls-client-ca", type=Path)
    parser.add_argument("--tls-required", action=argparse.BooleanOptionalAction)
    parser.add_argument("--status-file", type=Path, help="write the status to this file (JSON)")
    parser.add_argument(
        "--max-slot-wal-keep-size", type=int, help="limit the WAL kept for slots, in bytes"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        help="set the seconds of silence after which a reader is disconnected",
    )
    try:
        asyncio.run(_serve(parser.parse_args()))
    except TusklineError as error:
        logs.say_error(error)
        sys.exit(int(error.cause))


async def _serve(given: argparse.Namespace) -> None:
    stop = asyncio.Event()
    supervisor.stop_on_signals(stop)
    host, _, port = given.listen.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"--listen {given.listen}", repair="write host:port")
    server = WalServer(
        WalServerSettings(
            wal_dir=given.wal_dir,
            positions=given.positions,
            slots=given.slots,
            users=given.users,
            host=host.strip("[]"),
            port=int(port),
            tls=_tls(given),
            tls_required=given.tls_required,
            timeout=given.timeout,
            status_file=given.status_file,
            max_slot_wal_keep_size=given.max_slot_wal_keep_size,
        )
    )
    # All objects allocated so far live as long as the process.
    gc.freeze()
    await server.run(stop)


def _tls(given: argparse.Namespace) -> TlsFiles | None:
    if given.tls_cert is None and given.tls_key is None and given.tls_client_ca is None:
        return None
    if given.tls_cert is None or given.tls_key is None:
        raise UsageError("TLS needs --tls-cert and --tls-key")
    return TlsFiles(given.tls_cert, given.tls_key, given.tls_client_ca)


if __name__ == "__main__":
    main()
