"""The child processes of `log-server run` and `bridge run`: the settings of each, made from the configuration.

A part imports its own children's settings only, and not what runs in them.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from walsender_bridge.change_log.replica.settings import ReplicaServerSettings
from walsender_bridge.config import Config, SafekeepersSection, SourceSection
from walsender_bridge.config.sections import split_address
from walsender_bridge.errors import Cause, TusklineError
from walsender_bridge.provisioning.configured import capture_source
from walsender_bridge.runtime.child_process import child
from walsender_bridge.runtime.supervisor import Child

if TYPE_CHECKING:
    from walsender_bridge.capture.settings import CaptureSettings
    from walsender_bridge.quorum.proposer.settings import ProposerSettings
    from walsender_bridge.quorum.safekeeper.hosting import Hosted
    from walsender_bridge.quorum.safekeeper.settings import SafekeeperSettings
    from walsender_bridge.quorum.wal_server.settings import WalServerSettings
    from walsender_bridge.runtime.tls_files import TlsFiles

#: A proposer that ends with one of these was fenced, or would corrupt WAL: it must not be restarted (rule 5).
_PROPOSER_FINAL: Final = frozenset(
    {Cause.FENCED, Cause.DIVERGED, Cause.CORRUPT, Cause.INVARIANT, Cause.USAGE, Cause.CONFIG}
)
#: A capture that ends with one of these met WAL that its server can never send (`row_limit`), or a bug.
_CAPTURE_FINAL: Final = frozenset({Cause.INVARIANT, Cause.UNSUPPORTED_VALUE})


def replicas(config: Config) -> list[Child]:
    """The process of the log's replicas, of each log server of this machine."""
    return [
        child(
            f"replicas-{number}" if number > 1 else "replicas",
            "walsender_bridge.change_log.log_server",
            # A directory that is missing at a restart has been lost (`cli.parts` creates a new one).
            ReplicaServerSettings(each.data_dir, each.listen, tls=config.tls_files, create=False),
        )
        for number, each in enumerate(config.hosted_log_servers, 1)
    ]


def captures(config: Config) -> list[Child]:
    """The process of each source, if the bridge is on this machine."""
    if "bridge" not in config.parts:
        return []
    return [
        child(
            f"capture-{source.name}",
            "walsender_bridge.capture",
            capture_settings(config, source),
            final=_CAPTURE_FINAL,
        )
        for source in config.source
    ]


def capture_settings(config: Config, source: SourceSection) -> "CaptureSettings":
    """The settings of one source's capture."""
    from walsender_bridge.capture.gate.core import Rule
    from walsender_bridge.capture.settings import CaptureSettings

    gate = config.gate_of(source)
    return CaptureSettings(
        capture_source(source),
        config.log_address,
        config.spool_dir / source.name,
        source.spool_limit,
        config.gate_record(source),
        Rule(
            gate.names,
            members=bool(gate.members),
            quorum=gate.quorum or 0,
            on_missing=gate.on_missing,
            degrade_after=gate.degrade_after,
            safekeepers=gate.safekeepers,
        ),
        config.commit_page if gate.safekeepers else None,
        gate.max_uncommitted_bytes,
        config.capture_status(source),
    )


def proposers(config: Config) -> list[Child]:
    """The proposer's process, if safekeepers are configured."""
    source = config.quorum_source
    if source is None:
        return []
    settings = proposer_settings(config, source)
    return [child("proposer", "walsender_bridge.quorum.proposer", settings, final=_PROPOSER_FINAL)]


def proposer_settings(config: Config, source: SourceSection) -> "ProposerSettings":
    """The settings of the proposer of this source's server."""
    from walsender_bridge.quorum.proposer.effects import Limits
    from walsender_bridge.quorum.proposer.settings import ProposerSettings

    section = config.safekeepers
    # WAL in flight to a safekeeper takes memory as well: the queue gets the rest.
    inflight = Limits().inflight_bytes * len(section.proposed_to)
    return ProposerSettings(
        source.dsn,
        tuple(split_address(each) for each in section.proposed_to),
        section.application_name,
        section.slot,
        Limits(
            queue_bytes=section.max_queue_bytes - inflight,
            max_laggard_bytes=section.max_laggard_bytes,
        ),
        members_file=config.members_request,
        quorum_file=config.quorum_id_file,
        commit_page=config.commit_page,
        status_file=config.proposer_status,
        tls=config.tls_files,
    )


def safekeepers(
    hosted: "Sequence[Hosted]",
    section: SafekeepersSection,
    refused: Mapping[int, TusklineError] = MappingProxyType({}),
    tls: "TlsFiles | None" = None,
) -> list[Child]:
    """The processes of each: a hot loop and a WAL server, and an archiver if there is an archive.

    For one that was `refused`, by number, for a permanent reason, only the hot loop: it logs the reason, and ends for good.
    """
    from walsender_bridge.quorum.safekeeper.archive.settings import ArchiverSettings
    from walsender_bridge.quorum.safekeeper.hosting import FINAL

    quorum, found = "walsender_bridge.quorum", []
    for each in hosted:
        own = safekeeper_settings(each, section, tls)
        found.append(child(each.name, f"{quorum}.safekeeper", own, final=FINAL))
        if each.number in refused and refused[each.number].cause in FINAL:
            continue
        serving = wal_server_settings(each, section)
        found.append(child(each.wal_server, f"{quorum}.wal_server", serving))
        if section.archive is not None:
            name, module = f"archiver-{each.number}", f"{quorum}.safekeeper.archive.process"
            uploading = ArchiverSettings(each.data_dir, section.archive, each.archiver_status)
            found.append(child(name, module, uploading, final=FINAL))
    return found


def safekeeper_settings(
    each: "Hosted", section: SafekeepersSection, tls: "TlsFiles | None"
) -> "SafekeeperSettings":
    """The settings of a safekeeper's hot loop."""
    from walsender_bridge.quorum.safekeeper.settings import SafekeeperSettings
    from walsender_bridge.quorum.safekeeper.storage.segments import StorageLimits

    host, port = split_address(each.listen)
    return SafekeeperSettings(
        each.data_dir,
        host,
        port,
        each.positions,
        StorageLimits(section.wal_bytes, section.free_bytes),
        section.keep_bytes,
        section.archive,
        section.most_kept_for_slots,
        each.status,
        tls,
    )


def wal_server_settings(each: "Hosted", section: SafekeepersSection) -> "WalServerSettings":
    """The settings of a safekeeper's WAL server."""
    from walsender_bridge.quorum.safekeeper import data_dir
    from walsender_bridge.quorum.wal_server.settings import WalServerSettings
    from walsender_bridge.quorum.wal_server.tls import TlsFiles

    host, port = split_address(each.wal_listen)
    tls = None
    if section.tls_cert is not None and section.tls_key is not None:
        tls = TlsFiles(section.tls_cert, section.tls_key, section.tls_client_ca)
    return WalServerSettings(
        each.data_dir / data_dir.WAL,
        each.positions,
        each.data_dir / data_dir.SLOTS,
        section.users or each.data_dir / data_dir.USERS,
        host,
        port,
        tls,
        status_file=each.wal_server_status,
        max_slot_wal_keep_size=section.most_kept_for_slots,
    )
