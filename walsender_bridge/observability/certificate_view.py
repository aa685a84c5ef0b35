"""This machine's certificate of `[tls]`: when it ends, and whether that is soon."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from walsender_bridge.errors import ConfigError
from walsender_bridge.runtime import certificate_holder
from walsender_bridge.runtime.certificate_holder import Role
from walsender_bridge.runtime.tls_files import TlsFiles, ends_soon

if TYPE_CHECKING:
    from walsender_bridge.config import Config

REPAIR: Final = "issue another one with `tuskline certs issue`, and copy its files over these (docs/certificates.md)"


@dataclass(frozen=True, slots=True)
class CertificateView:
    """`begins`, `ends`: Unix times, 0 while the files are unfit; `error`: why they are."""

    file: str
    begins: float = 0.0
    ends: float = 0.0
    error: ConfigError | None = None

    def problem(self, now: float) -> str:
        """What is wrong with it, as a sentence without the repair; empty: nothing."""
        if self.error is not None:
            return f"certificate {self.file}: {self.error.what}"
        if not ends_soon(self.begins, self.ends, now):
            return ""
        day = f"{datetime.fromtimestamp(self.ends, UTC):%Y-%m-%d %H:%M} UTC"
        return f"certificate {self.file} {'expired' if self.is_over(now) else 'expires'} on {day}"

    def is_over(self, now: float) -> bool:
        """Whether nobody accepts it any more."""
        return self.error is not None or now > self.ends


def observe(settings: "Config") -> CertificateView | None:
    """The certificate; None without `[tls]`. One without the roles of this machine's parts is unfit."""
    if settings.tls_files is None:
        return None
    error = unfit(settings, settings.tls_files)
    if error is not None:
        return CertificateView(str(settings.tls_files.certificate), error=error)
    return of_files(settings.tls_files)


def of_files(files: TlsFiles) -> CertificateView:
    """The certificate of these files, whatever its roles are."""
    try:
        found = files.load(ended=True)
    except ConfigError as error:
        return CertificateView(str(files.certificate), error=error)
    return CertificateView(str(files.certificate), found.begins, found.ends)


def unfit(settings: "Config", files: TlsFiles) -> ConfigError | None:
    """Why the parts of this machine cannot run with its certificate; None: they can, but for its days."""
    needed = needed_roles(settings)
    if not needed:
        return None
    hosts = [host_of(address) for _, address in log_services(settings)]
    try:
        names = files.load(ended=True).names
        at = [host for host in hosts if files.names(host)]
    except ConfigError as error:
        return error
    serves = not settings.parts.isdisjoint({"repository", "log-server", "safekeepers"})
    what = certificate_holder.lacks(names, *needed, host=serves, at=at)
    if not what:
        return None
    return ConfigError(
        what,
        where=str(files.certificate),
        repair=f"{REPAIR}, with --role for each part that runs here, and --host for each host under which others reach it",
    )


def log_services(settings: "Config") -> list[tuple[str, str]]:
    """The addresses at which services of the log listen here, each behind its key."""
    places = [("[log] listen", settings.log.listen)] * ("repository" in settings.parts)
    return places + [("[[log_server]] listen", each.listen) for each in settings.hosted_log_servers]


def host_of(address: str) -> str:
    """The host of `host:port`, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def needed_roles(settings: "Config") -> list[frozenset[Role]]:
    """Of each part of this machine, the roles one of which its certificate needs."""
    found = {
        "repository": frozenset({Role.REPOSITORY}),
        "log-server": frozenset({Role.LOG_SERVER}),
        "safekeepers": frozenset({Role.SAFEKEEPER}),
        "bridge": frozenset({Role.WRITER, Role.OPERATOR}),
        "lake": frozenset({Role.LAKE, Role.OPERATOR}),
    }
    needed = [roles for part, roles in found.items() if part in settings.parts]
    if settings.quorum_source is not None:
        needed.append(frozenset({Role.PROPOSER, Role.OPERATOR}))
    return needed
