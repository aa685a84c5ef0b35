"""A log server ends with a signal, whichever of its threads the kernel gives it to."""

import ctypes
import signal
from pathlib import Path

import pytest

from tests.support.log_server_process import LogServer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_a_thread_of_grpc_takes_ends_the_log_server(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Python runs handlers in its main thread, which slept on."""
    with LogServer.running(tmp_path) as server:
        pid = server.process.pid
        threads = {
            int(each.name): (each / "comm").read_text().strip()
            for each in Path(f"/proc/{pid}/task").iterdir()
        }
        other = next(tid for tid, name in threads.items() if name.startswith("grpc"))
        assert ctypes.CDLL(None).tgkill(pid, other, number) == 0
        assert server.process.wait(20) == 0
