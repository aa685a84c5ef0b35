"""The data directories of the log servers that run here: one that is gone holds nothing, and its log server has stopped."""

from typing import TYPE_CHECKING

from walsender_bridge.change_log.replica import identity
from walsender_bridge.errors import UnavailableError
from walsender_bridge.runtime import pid_file

if TYPE_CHECKING:
    from walsender_bridge.config import Config


def lost(settings: "Config") -> dict[str, UnavailableError]:
    """By `listen`: the error of each log server of this machine that runs without its data directory."""
    if pid_file.owner(settings.run_dir, "log-server") is None:
        return {}
    return {
        each.listen: identity.lost(each.data_dir)
        for each in settings.hosted_log_servers
        if not (each.data_dir / identity.NAME).exists()
    }
