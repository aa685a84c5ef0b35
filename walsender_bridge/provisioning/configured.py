"""Converts the configuration of a source and of the quorum for the modules that act on servers.

Imports are local: commands that contact no server do not pay for importing a client.
"""

from typing import TYPE_CHECKING, Any

from walsender_bridge.errors import ConfigError

if TYPE_CHECKING:
    from walsender_bridge.config import Config, SourceSection


def capture_source(section: "SourceSection") -> Any:
    """The configured source, for capture."""
    from walsender_bridge.capture.source import CaptureSource

    return CaptureSource(
        section.name, section.dsn, section.slot_name, section.publication_name, section.tables
    )


def known_of(settings: "Config", section: "SourceSection") -> Any:
    """The position of the source's stream from the log or capture's status file (`KnownPosition`), or None."""
    from walsender_bridge.capture import stream_record

    # Capture's status file belongs to the log beside it: a new log has no history.
    folder = settings.log.data_dir if settings.etcd is None else None
    has_log = folder is None or (folder / "repository.sqlite").exists()
    written = settings.capture_status(section) if has_log else None
    return stream_record.ask(settings.log_address, written, section.name)


def needed_quorum(settings: "Config") -> Any:
    """The configured quorum, for `provisioning.quorum`. Raises `ConfigError` when there is none."""
    section = settings.quorum_source
    elsewhere = settings.machine is not None and "bridge" not in settings.parts
    if section is None and (settings.safekeepers.proposed_to or elsewhere):
        raise ConfigError(
            "the bridge, whose proposer the commits wait for, is on another machine",
            where="[machine] parts",
            repair="run the command there",
        )
    if section is None:
        raise ConfigError(
            "no safekeepers are configured", repair="add [safekeepers] with addresses, or local = 3"
        )
    return quorum_of(settings, section)


def quorum_of(settings: "Config", section: "SourceSection") -> Any:
    """The quorum of this source, even if the configuration no longer has safekeepers."""
    from walsender_bridge.provisioning.quorum import ConfiguredQuorum

    return ConfiguredQuorum(
        capture_source(section), settings.safekeepers.application_name, settings.safekeepers.slot
    )


def waits(quorum: Any, admin: str | None = None) -> str:
    """Describe whether commits wait on the server, and whether a standby acknowledges them."""
    from walsender_bridge.postgres.standby_names import StandbyNames
    from walsender_bridge.provisioning.quorum import facts, session

    with session(quorum, admin) as connection:
        found = facts(connection, quorum)
    names = StandbyNames.parse(found["names"])
    if names.names_it(quorum.name):
        if not names.needs(quorum.name):
            return f"{quorum.where}: commits return without the quorum: other standbys can acknowledge in its place (`tuskline doctor`)"
        if found["senders"]:
            return f"{quorum.where}: commits wait for the quorum"
        return (
            f"{quorum.where}: commits hang: they wait for {quorum.name}, which is not running "
            "(`tuskline up` starts it, `tuskline quorum release` lets them return)"
        )
    return (
        f"{quorum.where}: commits do not wait for the quorum yet: `tuskline up`, then "
        "`tuskline quorum require`"
    )
