"""Whether the addresses and folders that a configuration names can all be had at once."""

from ipaddress import ip_address
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from walsender_bridge.config.sections import split_address
from walsender_bridge.errors import ConfigError

if TYPE_CHECKING:
    from walsender_bridge.config import Config


def check_places(config: "Config", where: str) -> None:
    """Raise `ConfigError`, which names both keys, for an address or a folder of two parts."""
    listens = {"log.listen": config.log.listen}
    folders = {"log.data_dir": config.log.data_dir} if config.log.data_dir is not None else {}
    if config.machine is not None and config.data_dir != config.log.data_dir:
        folders["machine.data_dir"] = config.data_dir
    for number, section in enumerate(config.log_server):
        listens[f"log_server.{number}.listen"] = section.listen
        if section.data_dir is not None:
            folders[f"log_server.{number}.data_dir"] = section.data_dir
    if config.metrics is not None:
        listens["metrics.listen"] = config.metrics.listen
    for (name, address), (other, its) in combinations(listens.items(), 2):
        if _same_port(address, its):
            raise ConfigError(
                f"{name} and {other} are both {its}", where=where, repair="give each its own port"
            )
    for (name, folder), (other, its_folder) in combinations(folders.items(), 2):
        if folder.resolve() == its_folder.resolve():
            raise ConfigError(
                f"{name} and {other} are both {folder}",
                where=where,
                repair="give each its own folder",
            )
    _check_lake(config, folders, where)


def _same_port(address: str, other: str) -> bool:
    (host, port), (its_host, its_port) = split_address(address), split_address(other)
    return port == its_port and (host == its_host or _is_any(host) or _is_any(its_host))


def _is_any(host: str) -> bool:
    """Whether it stands for all addresses of the machine."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return host == "*"


def _check_lake(config: "Config", folders: dict[str, Path], where: str) -> None:
    """The lake's folder holds tables alone: what is not its own is swept from it, or in its way."""
    uri = "" if config.lake is None else config.lake.uri.removeprefix("file://")
    if not uri or "://" in uri:
        return
    lake = Path(uri).resolve()
    for name, folder in folders.items():
        kept = [folder, *(folder / part for part in ("streams", "run", "spool", "scratch"))]
        if any(lake == each.resolve() for each in kept) or lake in folder.resolve().parents:
            raise ConfigError(
                f"lake.uri and {name} are in each other's way: {lake}",
                where=where,
                repair="give the lake a folder of its own",
            )
