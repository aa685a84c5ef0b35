"""`tuskline log backup`: a copy of the metadata repository's database, also of one that runs."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from walsender_bridge.cli.options import DEFAULT_CONFIG, AsJson, ConfigPath, load_config, need_here
from walsender_bridge.errors import ConfigError
from walsender_bridge.runtime.output import Output


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("backup")(log_backup)


def log_backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Name of the copy, a new file.")],
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Copy the repository's database to a new file. The repository may run meanwhile."""
    settings = load_config(config)
    need_here(settings, "repository")
    if settings.etcd is not None:
        raise ConfigError(
            "the repository's records are in etcd",
            where=str(config),
            repair="take a snapshot of the cluster: `etcdctl snapshot save FILE`",
        )
    from walsender_bridge.change_log.repository.backup import backup

    made = backup(settings.repository_dir / "repository.sqlite", file.absolute())
    Output(as_json=as_json).record(asdict(made))
