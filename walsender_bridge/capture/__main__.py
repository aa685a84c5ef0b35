"""`python -m walsender_bridge.capture`: one capture process; the bridge's supervisor starts it with its settings.

The exit code is that of the error's cause. SIGTERM and SIGINT stop the process after the current step.
"""

import os
import signal
import sys
from typing import Never

from walsender_bridge.capture.driver import Capture
from walsender_bridge.capture.gate.monitor import GateMonitor, OpenGate, ServerGate
from walsender_bridge.capture.settings import CaptureSettings
from walsender_bridge.runtime import child_process


def capture(settings: CaptureSettings) -> None:
    """Run until a signal arrives."""
    running = Capture(settings, _gate(settings))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: running.stop())
    running.run()


def _gate(settings: CaptureSettings) -> GateMonitor:
    if not settings.gate.holds:
        return OpenGate()
    return ServerGate(settings.gate, settings.gate_record, settings.commit_page)


def _exit(code: int) -> Never:
    """Exit without waiting for threads that a hung log server may block."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _exit(child_process.run(CaptureSettings, capture))
