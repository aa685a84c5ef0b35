"""An authority of a test's own, and a change log whose services ask for its certificates."""

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

import pytest

from tests.support.log_entries import SCHEMAS, EntryMaker
from walsender_bridge.change_log.client import LogClient, ReplicaClient
from walsender_bridge.change_log.replica.service import ReplicaServer
from walsender_bridge.change_log.repository.service import RepositoryServer
from walsender_bridge.runtime import certificate_holder, certificates
from walsender_bridge.runtime.tls_files import TlsFiles

SERVER = ("log-server", "repository")
#: Where the tests' servers are reached.
HOSTS = ("127.0.0.1", "localhost")


def files_in(folder: Path) -> TlsFiles:
    return TlsFiles(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")


class Authority:
    """Issues certificates into folders beside its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = 0
        certificates.init_authority(folder / "authority")

    def issue(
        self, *roles: str, streams: tuple[str, ...] = ("*",), hosts: tuple[str, ...] = ()
    ) -> TlsFiles:
        self._number += 1
        uri = certificate_holder.identity("-".join(roles), roles, streams).uri()
        return self.issue_uri(uri, hosts)

    def issue_uri(self, uri: str, hosts: tuple[str, ...] = ()) -> TlsFiles:
        self._number += 1
        out = self.folder / f"issued-{self._number}"
        certificates.issue(self.folder / "authority", out, name="holder", uri=uri, hosts=hosts)
        return files_in(out)

    def expired(self, *roles: str, hosts: tuple[str, ...] = ()) -> TlsFiles:
        """A certificate of this authority that was valid until an hour ago."""

        class Earlier(datetime):
            @classmethod
            def now(cls, tz: object = None) -> Self:
                del tz
                then = datetime.now(UTC) - timedelta(days=1, hours=1)
                return cls.fromtimestamp(then.timestamp(), UTC)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(certificates, "datetime", Earlier)
            self._number += 1
            out = self.folder / f"issued-{self._number}"
            uri = certificate_holder.identity("former", roles).uri()
            certificates.issue(
                self.folder / "authority", out, name="former", uri=uri, hosts=hosts, days=1
            )
        return files_in(out)


def replace_files(old: TlsFiles, new: TlsFiles) -> None:
    """Put the new files in the old ones' places, as an operator would."""
    for path, source in ((old.ca, new.ca), (old.certificate, new.certificate), (old.key, new.key)):
        draft = path.with_name(f"{path.name}.new")
        shutil.copy(source, draft)
        draft.replace(path)


class TlsLog:
    """A log server and a repository, with committed entries in the streams `shop` and `bank`."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.authority = authority
        self.operator = authority.issue("operator")
        self.files = authority.issue(*SERVER, hosts=HOSTS)
        self.log_server = ReplicaServer(folder / "log-server", "127.0.0.1:0", tls=self.files)
        self.repository = RepositoryServer(
            folder / "log",
            "127.0.0.1:0",
            log_servers=[self.log_server.address],
            tls=self.files,
            tick=0.02,
        )
        self.repository.start()
        self.makers = {stream: EntryMaker() for stream in ("shop", "bank")}
        with self.log() as log:
            for stream in self.makers:
                log.create_stream(stream)
        for stream in self.makers:
            self.append(stream)

    def log(self, tls: TlsFiles | None = None) -> LogClient:
        return LogClient(self.repository.address, tls=tls or self.operator, timeout=5)

    def replica(self, tls: TlsFiles | None = None) -> ReplicaClient:
        return ReplicaClient(self.log_server.address, tls=tls or self.operator, timeout=5)

    def append(self, stream: str, tls: TlsFiles | None = None) -> None:
        """One more entry, until it is committed."""
        maker = self.makers[stream]
        with (
            self.log(tls) as log,
            log.open_writer(stream) as writer,
        ):
            writer.send([maker.whole()], schemas=list(SCHEMAS.values()))
            assert writer.next_ack(10) is not None
            log.barrier({stream: maker.end_lsn}, 10)

    def read(self, stream: str, tls: TlsFiles | None = None) -> list[bytes]:
        with self.replica(tls) as replica:
            end = self.status()[stream][1]
            return [bytes(each.data) for each in replica.read(stream, 1, end)]

    def status(self) -> dict[str, tuple[int, int, int, str, int]]:
        """What the replicas have: first and next offset, term, state, and the end of the last commit."""
        with self.replica() as replica:
            found = {stream: replica.stream_status(stream) for stream in self.makers}
        return {
            stream: (its.low_offset, its.end_offset, its.term, its.state, its.committed_end)
            for stream, its in found.items()
        }

    def stop(self) -> None:
        self.repository.stop()
        self.log_server.stop()
