"""A `WireEnd` with TLS, between holders of the authority's certificates.

The bytes go through memory, so nothing here waits, a peer that stops in the middle of a handshake included: like any other
that has not greeted, it is closed when its time is over.

Invariant: no byte is decoded or sent before the handshake has verified the peer's certificate, and, of a safekeeper, that it
names the host that was dialled. No more is taken from the socket than the buffer has room for, so nothing that has arrived
waits where poll does not see it.
"""

import contextlib
import select
import socket
import ssl
from typing import Final

from walsender_bridge.errors import (
    AuthenticationError,
    ConnectionFailedError,
    MalformedMessageError,
)
from walsender_bridge.quorum.protocol.message_socket import WireEnd
from walsender_bridge.runtime.certificate_holder import Identity, of_certificate
from walsender_bridge.runtime.tls_context import TlsContext

#: The longest record; OpenSSL holds back one that is incomplete.
_RECORD: Final = 5 + (16 << 10) + 256
#: Bytes that are decrypted, or encrypted, at once: more would only wait in memory.
_AT_ONCE: Final = 256 << 10
_REPAIR: Final = "issue it with `tuskline certs issue`; it has to be of the same authority, valid, and name its host (docs/certificates.md)"


class TlsWireEnd(WireEnd):
    """See the module. `host`: the name under which a safekeeper was dialled; None: the end that accepted."""

    slack = 2 * _RECORD

    def __init__(
        self, connected: socket.socket, where: str, tls: TlsContext, host: str | None = None
    ) -> None:
        super().__init__(connected, where)
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        current, self._context = tls.current(), tls
        self._dropped = tls.dropped
        self._tls = current.wrap_bio(
            self._arrived, self._leaving, server_side=host is None, server_hostname=host
        )
        self._shaken = False
        #: Encrypted bytes that the socket has not taken.
        self._unsent = memoryview(b"")
        self._holder: Identity | None = None

    @property
    def holder(self) -> Identity:
        """The holder of the peer's certificate, once a frame has arrived. Raises `PrivilegeError`."""
        if self._holder is None:
            self._holder = of_certificate(self._tls.getpeercert())
        return self._holder

    @property
    def is_outdated(self) -> bool:
        """Whether an authority was removed since the handshake: it may be that of the peer's certificate."""
        self._context.current()
        return self._context.dropped != self._dropped

    @property
    def events(self) -> int:
        """The events to poll for: before the end of the handshake, messages wait for the peer and not for the socket."""
        if self._shaken:
            return super().events
        waits = self._unsent or self._leaving.pending
        return select.EPOLLIN | select.EPOLLOUT if waits else select.EPOLLIN

    @property
    def sending(self) -> bool:
        """Whether there is unsent output."""
        return bool(self._unsent or self._leaving.pending) or super().sending

    # -- in -----------------------------------------------------------------------------------------

    def _take(self, room: memoryview) -> int:
        arrived = self._socket.recv(min(len(room) - _RECORD, _AT_ONCE))
        if not arrived:
            return 0
        self._arrived.write(arrived)
        if not self._shaken:
            self._shake_hands()
            self.flush()
        count = self._decrypt(room) if self._shaken else 0
        if count:
            return count
        raise BlockingIOError

    def _decrypt(self, room: memoryview) -> int:
        count = 0
        try:
            while taken := self._tls.read(len(room) - count, room[count:]):
                count += int(taken)
        except ssl.SSLWantReadError:
            return count
        except ssl.SSLError as error:
            raise self._failed(error) from None
        if count:
            return count
        raise ConnectionFailedError("the peer closed the connection", where=self.where)

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        except (ssl.SSLError, ssl.CertificateError) as error:
            # The peer learns why, unless it does not take these few bytes.
            with contextlib.suppress(OSError):
                self._socket.send(self._leaving.read())
            raise self._failed(error) from None
        self._shaken = True

    def _failed(self, error: ssl.SSLError) -> Exception:
        """Which error it is: of a certificate, here or at the peer, or of bytes that are no TLS."""
        if isinstance(error, ssl.SSLCertVerificationError):
            what = f"the peer's certificate is refused: {error.verify_message}"
            return AuthenticationError(what, where=self.where, repair=_REPAIR)
        reason = (error.reason or str(error)).replace("_", " ").lower()
        if "alert" in reason:
            what = f"the peer refused this certificate: {reason}"
            return AuthenticationError(what, where=self.where, repair=_REPAIR)
        if "certificate" in reason:
            what = f"the peer's certificate is refused: {reason}"
            return AuthenticationError(what, where=self.where, repair=_REPAIR)
        return MalformedMessageError(f"the peer does not speak TLS: {reason}", where=self.where)

    # -- out ----------------------------------------------------------------------------------------

    def _send_out(self) -> None:
        if not self._shaken:
            self._shake_hands()
        while True:
            if not self._unsent:
                if self._shaken:
                    self._encrypt()
                self._unsent = memoryview(self._leaving.read())
                if not self._unsent:
                    return
            sent = self._socket.send(self._unsent)
            self._unsent = self._unsent[sent:]

    def _encrypt(self) -> None:
        """Encrypt what is queued, as much as is sent at once."""
        out = self._out
        while out and self._leaving.pending < _AT_ONCE:
            first = out.popleft()
            piece = memoryview(first)[:_AT_ONCE]
            self._tls.write(piece)
            self._out_bytes -= len(piece)
            if len(piece) < len(first):
                out.appendleft(memoryview(first)[len(piece) :])


def wire(
    connected: socket.socket, where: str, tls: TlsContext | None, host: str | None = None
) -> WireEnd:
    """The end of a connection, with TLS if there is a certificate. `host`: of the safekeeper; None: it is this one."""
    return WireEnd(connected, where) if tls is None else TlsWireEnd(connected, where, tls, host)
