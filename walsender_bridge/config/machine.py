"""The parts of a configuration that are on this machine, and whether its sections agree with that."""

from typing import TYPE_CHECKING, Final

from walsender_bridge.errors import ConfigError

if TYPE_CHECKING:
    from walsender_bridge.config import Config, Part

#: What a part needs in the file: a key, and the section in which it is.
_NEEDS: Final[dict["Part", tuple[str, ...]]] = {
    "repository": ("log.data_dir", "log_server"),
    "bridge": ("source",),
    "log-server": ("log_server.data_dir",),
    "safekeepers": ("safekeepers.local", "safekeepers.data_dir"),
    "lake": ("lake", "source"),
    "slots": ("slots",),
}
#: The keys that say that a part is on this machine: they contradict `[machine] parts` without that part.
_OWN: Final[dict[str, "Part"]] = {
    "log.data_dir": "repository",
    "log_server.data_dir": "log-server",
    "safekeepers.local": "safekeepers",
}


def parts_here(config: "Config") -> frozenset["Part"]:
    """The parts that `[machine]` names; without it, all that the file describes."""
    if config.machine is not None:
        return frozenset(config.machine.parts)
    found: set[Part] = {"repository", "bridge", "log-server"}
    if config.safekeepers.local:
        found.add("safekeepers")
    if config.lake is not None:
        found.add("lake")
    if config.slots is not None:
        found.add("slots")
    return frozenset(found)


def check_machine(config: "Config", where: str) -> None:
    """Raise `ConfigError` for a part without what it needs, or for what belongs to a part that is elsewhere."""
    given = _given(config)
    for part, keys in _NEEDS.items():
        for key in keys:
            if part in config.parts and not given[key]:
                raise _missing(config, part, key, where)
    if config.machine is None:
        return
    for key, part in _OWN.items():
        if given[key] and part not in config.parts:
            raise ConfigError(
                f"{key} is for the {part} of this machine, which machine.parts does not name",
                where=where,
                repair=f'add "{part}" to machine.parts, or remove {key}: it belongs to another machine',
            )


def _given(config: "Config") -> dict[str, bool]:
    section = config.safekeepers
    has_log_server = any(each.data_dir is not None for each in config.log_server)
    return {
        "log.data_dir": config.log.data_dir is not None,
        "log_server": bool(config.log_server),
        "log_server.data_dir": has_log_server,
        "source": bool(config.source),
        "safekeepers.local": section.local > 0,
        # A default beside the log server; without one, the folder must not depend on what is added later.
        "safekeepers.data_dir": section.data_dir is not None or has_log_server,
        "lake": config.lake is not None,
        "slots": config.slots is not None,
    }


def _missing(config: "Config", part: "Part", key: str, where: str) -> ConfigError:
    what = f"{key!r} is missing"
    if key == "log_server.data_dir":
        what = "no [[log_server]] has a data_dir"
    if config.machine is not None:
        return ConfigError(
            f"{what}, and machine.parts names the {part}",
            where=where,
            repair=f'add {key}, or remove "{part}" from machine.parts if it is on another machine',
        )
    return ConfigError(
        what,
        where=where,
        repair=f"add {key}, or name in [machine] parts what runs on this machine",
    )
