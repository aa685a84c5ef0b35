"""The child processes of `log-server run` and `bridge run`: the settings of each, made from the configuration.

A part imports its own children's settings only, and not what runs in them.
"""

from typing import TYPE_CHECKING, Final

from walsender_bridge.change_log.replica.settings import ReplicaServerSettings
from walsender_bridge.config import Config, SourceSection
from walsender_bridge.errors import Cause
from walsender_bridge.provisioning.configured import capture_source
from walsender_bridge.runtime.child_process import child
from walsender_bridge.runtime.supervisor import Child

if TYPE_CHECKING:
    from walsender_bridge.capture.settings import CaptureSettings

#: A capture that ends with one of these met WAL that its server can never send (`wire.row_limit`), or a bug.
_CAPTURE_FINAL: Final = frozenset({Cause.INVARIANT, Cause.UNSUPPORTED_VALUE})


def replicas(config: Config) -> Child:
    """The process of the log's replicas."""
    section = config.log_server[0]
    settings = ReplicaServerSettings(section.data_dir, section.listen)
    return child("replicas", "walsender_bridge.change_log.log_server", settings)


def captures(config: Config) -> list[Child]:
    """The process of each source."""
    return [
        child(
            f"capture-{source.name}",
            "walsender_bridge.capture",
            capture_settings(config, source),
            final=_CAPTURE_FINAL,
        )
        for source in config.source
    ]


def capture_settings(config: Config, source: SourceSection) -> "CaptureSettings":
    """The settings of one source's capture."""
    from walsender_bridge.capture.gate.core import Rule
    from walsender_bridge.capture.settings import CaptureSettings

    gate = config.gate_of(source)
    return CaptureSettings(
        capture_source(source),
        config.log_address,
        config.spool_dir / source.name,
        source.spool_limit,
        config.gate_record(source),
        Rule(
            gate.names,
            members=bool(gate.members),
            quorum=gate.quorum or 0,
            on_missing=gate.on_missing,
            degrade_after=gate.degrade_after,
            safekeepers=gate.safekeepers,
        ),
        config.commit_page if gate.safekeepers else None,
        gate.max_uncommitted_bytes,
        config.capture_status(source),
    )
