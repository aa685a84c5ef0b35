"""This machine's certificate of `[tls]`: when it ends, and whether that is soon."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from walsender_bridge.errors import ConfigError
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
        return f"certificate {self.file} {'ended' if self.is_over(now) else 'ends'} on {day}"

    def is_over(self, now: float) -> bool:
        """Whether nobody accepts it any more."""
        return self.error is not None or now > self.ends


def observe(settings: "Config") -> CertificateView | None:
    """The certificate; None without `[tls]`."""
    return None if settings.tls_files is None else of_files(settings.tls_files)


def of_files(files: TlsFiles) -> CertificateView:
    """The certificate of these files."""
    try:
        begins, ends = files.days()
    except ConfigError as error:
        return CertificateView(str(files.certificate), error=error)
    return CertificateView(str(files.certificate), begins, ends)
