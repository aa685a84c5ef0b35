"""Options that many commands share, and what they mean in a configuration."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from walsender_bridge.errors import ConfigError, LakeError, UsageError

if TYPE_CHECKING:
    from walsender_bridge.config import Config, LakeSection, SourceSection

DEFAULT_CONFIG = Path("tuskline.toml")

ConfigPath = Annotated[
    Path, typer.Option("--config", "-c", envvar="TUSKLINE_CONFIG", help="The TOML file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; the result is the last line.")]
Admin = Annotated[
    str | None,
    typer.Option(
        "--admin",
        help="Act as an administrator: what its connection string has otherwise than the source's, "
        "for example 'user=postgres'. No password: see .pgpass, PGPASSWORD, service files.",
    ),
]
OneSource = Annotated[
    str | None, typer.Option("--source", help="This source only; otherwise all of them.")
]


def load_config(path: Path) -> "Config":
    """`config.load_config`, imported when a command runs: `--help` does without its library."""
    from walsender_bridge import config

    return config.load_config(path)


def chosen_sources(settings: "Config", name: str | None) -> "list[SourceSection]":
    """The sources that `--source` means. Raises `ConfigError`."""
    found = [source for source in settings.source if name in {None, source.name}]
    if not found:
        raise ConfigError(
            f"there is no source {name!r}",
            repair="one of: " + ", ".join(source.name for source in settings.source),
        )
    return found


def lake_section(settings: "Config") -> "LakeSection":
    """The configured lake. Raises `LakeError`."""
    if settings.lake is None:
        raise LakeError("no [lake] is configured", repair="add [lake] with a uri to the file")
    return settings.lake


def checked_admin(admin: str | None) -> str | None:
    """The value of `--admin`. Raises `UsageError` for a password: arguments are everybody's to read."""
    from walsender_bridge.config import has_password

    if admin is not None and has_password(admin):
        raise UsageError(
            "--admin: a password in an argument can be read by every user of this machine",
            repair="put it into ~/.pgpass, PGPASSWORD or a service file",
        )
    return admin
