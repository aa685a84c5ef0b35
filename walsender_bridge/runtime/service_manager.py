"""Tells systemd that the service has started (`sd_notify(3)`), if it started it with `Type=notify`."""

import contextlib
import os
import socket
from typing import Final

_VARIABLE: Final = "NOTIFY_SOCKET"


def say_ready() -> None:
    """Say it once; children must not. Without a service manager, or if it does not listen, nothing happens."""
    address = os.environ.pop(_VARIABLE, "")
    if not address:
        return
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager,
    ):
        # "@" stands for the zero byte of an abstract address.
        manager.sendto(b"READY=1", f"\0{address[1:]}" if address[0] == "@" else address)
