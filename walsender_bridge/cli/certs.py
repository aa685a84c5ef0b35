"""`tuskline certs`: certificates for the machines of one log, and an authority that issues them."""

from pathlib import Path
from typing import Annotated, Any

import typer

from walsender_bridge.cli.options import AsJson
from walsender_bridge.errors import UsageError
from walsender_bridge.runtime import extras
from walsender_bridge.runtime.output import Output

certs_app = typer.Typer(
    help="Create a certificate authority, and issue certificates.",
    no_args_is_help=True,
)
_MOST_DAYS = 36_500

_Roles = Annotated[
    list[str],
    typer.Option(
        "--role",
        help="Role of the holder: log-server, repository, writer, reader, lake, proposer, safekeeper, monitor or operator. "
        "Repeatable. See docs/certificates.md.",
    ),
]
_Name = Annotated[str, typer.Option("--name", help="Name of the holder, shown in errors and logs.")]
_Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        help="Name or address under which clients reach a repository, log server or safekeeper. Repeatable.",
    ),
]
_Streams = Annotated[
    list[str] | None,
    typer.Option(
        "--stream", help="Stream that the holder may read or write; default: all. Repeatable."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    app.add_typer(certs_app, name="certs")


@certs_app.command("init")
def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="New or empty folder of the authority.")
    ],
    days: Annotated[
        int, typer.Option(help="Days for which the authority is valid.", min=1, max=_MOST_DAYS)
    ] = 3650,
    as_json: AsJson = False,
) -> None:
    """Create a certificate authority.

    Every account that can read its folder has all rights on log and safekeepers.
    """
    extras.need("certs")
    from walsender_bridge.runtime import certificates

    _show(certificates.init_authority(folder, days=days), {}, as_json=as_json)


@certs_app.command("issue")
def issue(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the authority.")],
    role: _Roles,
    name: _Name,
    out: Annotated[
        Path, typer.Option(help="New or empty folder for ca.pem, cert.pem and key.pem.")
    ],
    host: _Hosts = None,
    stream: _Streams = None,
    days: Annotated[
        int, typer.Option(help="Days for which the certificate is valid.", min=1, max=_MOST_DAYS)
    ] = 365,
    as_json: AsJson = False,
) -> None:
    """Issue a certificate for [tls] into a new folder.

    Copy that folder to the machine or reader that the certificate is for.
    """
    extras.need("certs")
    from walsender_bridge.runtime import certificates

    uri, shown = _holder(name, role, host or [], stream or [])
    issued = certificates.issue(folder, out, name=name, uri=uri, hosts=host or [], days=days)
    _show(issued, shown, as_json=as_json)


@certs_app.command("names")
def names(
    role: _Roles,
    name: _Name,
    host: _Hosts = None,
    stream: _Streams = None,
    as_json: AsJson = False,
) -> None:
    """Show the alternative names that a certificate must contain.

    Use it if another authority issues your certificates. The order of the names counts: see docs/certificates.md.
    """
    from walsender_bridge.runtime import certificate_holder

    hosts = host or []
    uri, shown = _holder(name, role, hosts, stream or [])
    shown |= {"uri": uri, "service_names": certificate_holder.service_names(uri, hosts)}
    Output(as_json=as_json).record(shown if as_json else _joined(shown))


def _joined(record: dict[str, Any]) -> dict[str, Any]:
    return {k: ", ".join(v) if isinstance(v, list) else v for k, v in record.items()}


def _holder(
    name: str, roles: list[str], hosts: list[str], streams: list[str]
) -> tuple[str, dict[str, Any]]:
    """The holder's URI, and how it is shown. Raises `UsageError` or `ConfigError`."""
    from walsender_bridge.runtime import certificate_holder
    from walsender_bridge.runtime.certificate_holder import SERVERS, Role

    unknown = next((each for each in roles if each not in set(Role)), None)
    if unknown is not None:
        raise UsageError(
            f"--role: unknown role {unknown[:40]!r}", repair="use one of: " + ", ".join(Role)
        )
    holder = certificate_holder.identity(name, roles, streams or (certificate_holder.ALL_STREAMS,))
    if hosts and not holder.roles & SERVERS:
        raise UsageError(
            "--host is for servers, and none of these roles is one of a server",
            repair="add --role repository, log-server or safekeeper, or remove --host",
        )
    if not hosts and holder.roles & SERVERS:
        raise UsageError(
            "a repository, log server or safekeeper needs --host",
            repair="add --host with the host of its `listen`, once for each name that clients use",
        )
    for each in hosts:
        certificate_holder.check_host(each)
    if streams and Role.REPOSITORY in holder.roles:
        raise UsageError(
            "--stream: a repository orders all streams",
            repair="remove --stream, or issue a certificate of its own to the other roles",
        )
    shown = {"name": name, "roles": sorted(holder.roles), "streams": sorted(holder.streams)}
    return holder.uri(), shown | {"hosts": hosts}


def _show(issued: Any, shown: dict[str, Any], *, as_json: bool) -> None:
    record = {
        "folder": str(issued.folder),
        **shown,
        "valid_until": f"{issued.valid_until:%Y-%m-%dT%H:%M:%SZ}",
        "serial_number": issued.serial_number,
    }
    Output(as_json=as_json).record(record if as_json else _joined(record))
