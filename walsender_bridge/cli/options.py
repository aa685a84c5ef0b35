"""Options that several commands share, and their values in a configuration."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from walsender_bridge.errors import ConfigError, LakeError, UsageError

if TYPE_CHECKING:
    from walsender_bridge.config import Config, LakeSection, Part, SourceSection

DEFAULT_CONFIG = Path("tuskline.toml")

ConfigPath = Annotated[
    Path,
    typer.Option("--config", "-c", envvar="TUSKLINE_CONFIG", help="Configuration file, in TOML."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, on the last line.")]
Admin = Annotated[
    str | None,
    typer.Option(
        "--admin",
        help="Connect as an administrator: connection parameters that override the source's DSN, "
        "such as 'user=postgres'. Passwords come from ~/.pgpass, PGPASSWORD or a service file.",
    ),
]
OneSource = Annotated[
    str | None, typer.Option("--source", help="Name of one source; default: all.")
]


def load_config(path: Path) -> "Config":
    """`config.load_config`, imported when a command runs, so that `--help` does not load its library."""
    from walsender_bridge import config

    return config.load_config(path)


def chosen_sources(settings: "Config", name: str | None) -> "list[SourceSection]":
    """The sources that `--source` selects. Raises `ConfigError`."""
    found = [source for source in settings.source if name in {None, source.name}]
    if not found and name is not None:
        raise ConfigError(
            f"source {name!r} is not configured",
            repair="name one of: " + ", ".join(source.name for source in settings.source),
        )
    return found


def need_here(settings: "Config", *parts: "Part") -> None:
    """Raises `ConfigError` unless one of the parts is on this machine."""
    if settings.parts.isdisjoint(parts):
        raise ConfigError(
            f"the {' and the '.join(parts)} of this configuration {'is' if len(parts) == 1 else 'are'} on another machine",
            where="[machine] parts",
            repair=f'run the command there, or add "{parts[0]}" to machine.parts',
        )


def named_log(settings: "Config", path: Path) -> str:
    """The address of the log. Raises `ConfigError` on a machine that needs none, if its file does not name it."""
    if not settings.names_repository:
        raise ConfigError(
            "this file names no repository of the log",
            where=str(path),
            repair="run the command on the repository's machine, or name it as listen, or repositories, in a section [log]",
        )
    return settings.log_address


def lake_section(settings: "Config") -> "LakeSection":
    """The configured lake. Raises `LakeError`, or `ConfigError` on one of several machines that does not know it."""
    if settings.lake is None:
        if settings.machine is not None:
            need_here(settings, "lake")
        raise LakeError(
            "no lake is configured", repair="add a section [lake] with a uri to the configuration"
        )
    return settings.lake


def checked_admin(admin: str | None) -> str | None:
    """The value of `--admin`. Raises `UsageError` for a password, since every account can read arguments."""
    from walsender_bridge.config import has_password

    if admin is not None and has_password(admin):
        raise UsageError(
            "--admin must not contain a password, which every user of this machine could read",
            repair="put it into ~/.pgpass, PGPASSWORD or a service file",
        )
    return admin
