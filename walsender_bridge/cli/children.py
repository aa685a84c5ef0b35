"""The child processes of `log-server run` and `bridge run`: the settings of each, made from the configuration."""

from walsender_bridge.change_log.replica.settings import ReplicaServerSettings
from walsender_bridge.config import Config
from walsender_bridge.runtime.child_process import child
from walsender_bridge.runtime.supervisor import Child


def replicas(config: Config) -> Child:
    """The process of the log's replicas."""
    section = config.log_server[0]
    settings = ReplicaServerSettings(section.data_dir, section.listen)
    return child("replicas", "walsender_bridge.change_log.log_server", settings)
