"""`tuskline wait`: returns when clients may be let into the server."""

from typing import Annotated

import typer

from walsender_bridge.cli.options import (
    DEFAULT_CONFIG,
    Admin,
    AsJson,
    ConfigPath,
    checked_admin,
    load_config,
)
from walsender_bridge.errors import UsageError
from walsender_bridge.provisioning.configured import needed_quorum
from walsender_bridge.runtime.output import Output


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("wait")(wait)


def wait(
    config: ConfigPath = DEFAULT_CONFIG,
    quorum: Annotated[
        bool,
        typer.Option(
            "--quorum",
            help="Wait until a quorum has all that the server showed at the start of the wait.",
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.")] = 60.0,
    admin: Admin = None,
    as_json: AsJson = False,
) -> None:
    """Wait until a quorum has all WAL that the server shows.

    Run it after a crash of the server, before clients connect.
    """
    if not quorum:
        raise UsageError("no condition to wait for is given", repair="use tuskline wait --quorum")
    from walsender_bridge.provisioning.quorum_gate import wait_ready

    state = wait_ready(needed_quorum(load_config(config)), timeout, checked_admin(admin))
    Output(as_json=as_json).record(state.to_json())
