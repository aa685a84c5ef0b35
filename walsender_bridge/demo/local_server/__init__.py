"""Local PostgreSQL servers, created and run for the demo and for tests."""

from walsender_bridge.demo.local_server.installation import Installation, by_major, installations
from walsender_bridge.demo.local_server.server import LocalServer, free_port, free_ports
from walsender_bridge.demo.local_server.standby import has_slots, make_standby

__all__ = [
    "Installation",
    "LocalServer",
    "by_major",
    "free_port",
    "free_ports",
    "has_slots",
    "installations",
    "make_standby",
]
