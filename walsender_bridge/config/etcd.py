"""Whether `[etcd]`, `[log] store`, `[log] repositories` and `[machine] elect_bridge` fit together."""

from ipaddress import ip_address
from typing import TYPE_CHECKING

from walsender_bridge.config.sections import first_repeated, split_address
from walsender_bridge.errors import ConfigError
from walsender_bridge.runtime.listening import is_loopback

if TYPE_CHECKING:
    from walsender_bridge.config import Config


def check_etcd(config: "Config", where: str) -> None:
    """Raise `ConfigError` for a store without its section, and for repositories or bridges that could not replace each other."""
    elects = config.machine is not None and config.machine.elect_bridge
    if elects and "bridge" not in config.parts:
        raise ConfigError(
            "machine.elect_bridge is for the bridge of this machine, which machine.parts does not name",
            where=where,
            repair='add "bridge" to machine.parts, or remove machine.elect_bridge',
        )
    if elects and config.etcd is None:
        raise ConfigError(
            "machine.elect_bridge: of several bridges, one is elected in etcd, and there is no [etcd]",
            where=where,
            repair="add [etcd] with endpoints; or have a bridge on one machine only, without machine.elect_bridge",
        )
    _check_strangers(config, where)
    others = config.log.repositories
    if twice := first_repeated(others):
        raise ConfigError(
            f"log.repositories: {twice} is listed twice", where=where, repair="remove one of them"
        )
    if "repository" in config.parts:
        _check_store(config, where)
    else:
        _check_elsewhere(config, where, elects=elects)


def _check_strangers(config: "Config", where: str) -> None:
    """Whoever reaches an etcd without certificates may change the log's records, and reads them on the way."""
    if config.etcd is None or config.etcd.tls_files is not None:
        return
    for endpoint in config.etcd.endpoints:
        host, _ = split_address(endpoint)
        if not is_loopback(host):
            raise ConfigError(
                "etcd.endpoints: other machines could reach this etcd, and [etcd] has no ca, certificate and key",
                where=f"{where}, {endpoint}",
                repair="have etcd ask for certificates of an authority of its own (docs/three-machines.md), and name the three files",
            )


def _check_store(config: "Config", where: str) -> None:
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
            repair='set log.store = "etcd" and add [etcd], or remove log.repositories',
        )
    if others and not any(_listens_at(config.log.listen, each) for each in others):
        raise ConfigError(
            f"log.repositories lacks {config.log.listen}, where the repository of this machine listens: nobody would ask it",
            where=where,
            repair="name the same addresses on every machine, of all repositories",
        )


def _listens_at(listen: str, address: str) -> bool:
    """Whether a repository that listens there may be the one at this address."""
    host, port = split_address(listen)
    try:
        everywhere = ip_address(host).is_unspecified
    except ValueError:
        everywhere = host == "*"
    return listen == address or (everywhere and port == split_address(address)[1])


def _check_elsewhere(config: "Config", where: str, *, elects: bool) -> None:
    for key, given in {
        "log.store": config.log.store == "etcd",
        "etcd": config.etcd is not None and not elects,
    }.items():
        if given:
            raise ConfigError(
                f"{key} is for the repository of this machine, which machine.parts does not name",
                where=where,
                repair=f'add "repository" to machine.parts, or remove {key}: log.repositories is enough to reach it elsewhere',
            )
