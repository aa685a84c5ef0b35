"""Whether `[etcd]`, `[log] store` and `[log] repositories` fit together."""

from typing import TYPE_CHECKING

from walsender_bridge.errors import ConfigError

if TYPE_CHECKING:
    from walsender_bridge.config import Config


def check_etcd(config: "Config", where: str) -> None:
    """Raise `ConfigError` for a store without its section, and for repositories that could not replace each other."""
    uses = config.log.store == "etcd"
    if uses == (config.etcd is None):
        raise ConfigError(
            'log.store = "etcd" and [etcd] belong together',
            where=where,
            repair="add [etcd] with endpoints" if uses else 'set log.store = "etcd", or remove it',
        )
    others = config.log.repositories
    if others and not uses:
        raise ConfigError(
            "log.repositories: several repositories need a store that all of them reach",
            where=where,
            repair='set log.store = "etcd", or remove log.repositories',
        )
    if len(set(others)) < len(others):
        raise ConfigError(
            "log.repositories: each repository once", where=where, repair="remove the second one"
        )
