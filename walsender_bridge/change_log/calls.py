"""The calls in progress of a Flight service: how many there may be, and whose they are.

Each has a thread of the process. A call beyond a limit is refused, so no holder of a certificate takes all threads: one holder
has at most half of the calls, and fewer of those that wait. An answer with entries is in memory until its client has read it: few
are sent at once, and others wait for their turn. Appends last as long as their writer: where a stream has more of
them than it has writers, the connection of the oldest is ended.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Final
from urllib.parse import unquote

from walsender_bridge.change_log.connection_limits import PeerCalls
from walsender_bridge.errors import UnavailableError
from walsender_bridge.runtime import tcp_connections

#: Calls in progress in all; of one holder; and of one holder that wait for an event, as barriers do.
MOST_CALLS: Final = 512
MOST_OF_HOLDER: Final = 256
MOST_WAITS_OF_HOLDER: Final = 64
#: Appends and synchronizations of one stream: one is in use, and others have not noticed that they are over.
MOST_APPENDS: Final = 8

#: Answers with entries that are sent at once, in all and to one holder, each of 4 MiB or a longer row; seconds that others wait.
MOST_ANSWERS: Final = 64
MOST_ANSWERS_OF_HOLDER: Final = 48
ANSWER_WAIT: Final = 30.0
#: Seconds in which a client has read an answer, and bytes of it for each further second.
_ANSWER_SECONDS: Final = 60.0
_ANSWER_RATE: Final = 1 << 20


class Calls:
    """See the module. Threads may share it. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Condition()
        self._peers: dict[str, PeerCalls] = {}
        self._open = 0
        self._by_holder: Counter[bytes] = Counter()
        self._waits: Counter[bytes] = Counter()
        self._answers: Counter[bytes] = Counter()
        #: The peers of a stream's appends, the oldest first.
        self._appends: defaultdict[str, list[str]] = defaultdict(list)

    def begin(self, name: str, holder: bytes) -> "Call":
        """A call of the peer that Flight calls `name`, until `Call.end`. `holder`: of its certificate; empty: without TLS.

        Raises `UnavailableError` if there are too many.
        """
        peer = _peer(name)
        with self._lock:
            # Refused or not, its request has arrived.
            its = self._peers.setdefault(peer, PeerCalls(holder))
            its.begun += 1
            its.open += 1
            self._open += 1
            self._by_holder[holder] += 1
            total, own = self._open, self._by_holder[holder]
        call = Call(self, peer, holder)
        if total > MOST_CALLS or (holder and own > MOST_OF_HOLDER):
            call.end()
            raise UnavailableError(
                f"too many calls in progress: {total}, {own} of them with this client's certificate",
                repair="try again later, or make fewer calls at once",
            )
        return call

    def by_peer(self) -> dict[str, PeerCalls]:
        """The calls of each peer, as they are now."""
        with self._lock:
            return {
                peer: replace(its, answers_due={**its.answers_due})
                for peer, its in self._peers.items()
            }

    def forget(self, connected: Collection[str]) -> None:
        """Forget the peers that are not connected and have no calls."""
        with self._lock:
            left = [p for p, its in self._peers.items() if not its.open and p not in connected]
            for peer in left:
                del self._peers[peer]

    def end(self, call: "Call") -> None:
        """For `Call.end`."""
        with self._lock:
            its = self._peers[call.peer]
            its.open -= 1
            its.ended_at = self._clock()
            self._open -= 1
            _subtract(self._by_holder, call.holder)
            if call.answers:
                _subtract(self._answers, call.holder)
                its.answers_due.pop(id(call), None)
                self._lock.notify_all()

    def took(self, call: "Call", count: int) -> None:
        """For `Call.took`."""
        with self._lock:
            self._peers[call.peer].taken += count

    def answer(self, call: "Call") -> None:
        """For `Call.answer`."""
        with self._lock:
            if not self._lock.wait_for(lambda: self._has_room(call.holder), ANSWER_WAIT):
                raise UnavailableError(
                    f"too many answers at once: {self._answers.total()} are being read",
                    repair="try again later, or read with fewer clients at once",
                )
            self._answers[call.holder] += 1
            call.answers = True

    def _has_room(self, holder: bytes) -> bool:
        own = not holder or self._answers[holder] < MOST_ANSWERS_OF_HOLDER
        return own and self._answers.total() < MOST_ANSWERS

    def sends(self, call: "Call", count: int) -> None:
        """For `Call.sends`."""
        with self._lock:
            due = self._clock() + _ANSWER_SECONDS + count / _ANSWER_RATE
            self._peers[call.peer].answers_due[id(call)] = due

    @contextmanager
    def waiting(self, call: "Call") -> Iterator[None]:
        """For `Call.waiting`."""
        with self._lock:
            if call.holder and self._waits[call.holder] >= MOST_WAITS_OF_HOLDER:
                raise UnavailableError(
                    f"too many calls that wait: {MOST_WAITS_OF_HOLDER} with this client's certificate",
                    repair="try again later, or stop some of the clients that wait",
                )
            self._waits[call.holder] += 1
        try:
            yield
        finally:
            with self._lock:
                _subtract(self._waits, call.holder)

    @contextmanager
    def appending(self, call: "Call", stream: str) -> Iterator[None]:
        """For `Call.appending`."""
        with self._lock:
            others = self._appends[stream]
            if len(others) >= 2 * MOST_APPENDS:
                raise UnavailableError(
                    f"too many open appends: stream {stream} has {len(others)}",
                    repair="try again: the oldest are being ended",
                )
            if len(others) >= MOST_APPENDS:
                oldest = next(p for p in others if p == others[-1] or not self._peers[p].unwanted)
                self._peers[oldest].unwanted = f"stream {stream} has too many open appends"
            others.append(call.peer)
            self._peers[call.peer].appends += 1
        try:
            yield
        finally:
            with self._lock:
                others.remove(call.peer)
                self._peers[call.peer].appends -= 1


class Call:
    """A call in progress. Made by `Calls.begin`."""

    def __init__(self, calls: Calls, peer: str, holder: bytes) -> None:
        self._calls = calls
        self.peer = peer
        self.holder = holder
        #: Whether it has its turn to send entries.
        self.answers = False

    def took(self, count: int) -> None:
        """This many more bytes of its client's have arrived."""
        self._calls.took(self, count)

    def answer(self) -> None:
        """Wait for the turn to send entries, until the call's end. Raises `UnavailableError` if it takes long."""
        self._calls.answer(self)

    def sends(self, count: int) -> None:
        """This many bytes are being sent, which its client has to read in time."""
        self._calls.sends(self, count)

    def waiting(self) -> AbstractContextManager[None]:
        """A block that waits for an event. Raises `UnavailableError` if too many do."""
        return self._calls.waiting(self)

    def appending(self, stream: str) -> AbstractContextManager[None]:
        """A block that takes the stream's entries. Raises `UnavailableError` if too many do."""
        return self._calls.appending(self, stream)

    def end(self) -> None:
        """The call is over."""
        self._calls.end(self)


def _subtract(counter: Counter[bytes], holder: bytes) -> None:
    counter[holder] -= 1
    if not counter[holder]:
        del counter[holder]


def _peer(name: str) -> str:
    """Flight's name of a peer, like `ipv4:127.0.0.1:50000`, as `tcp_connections` has it."""
    host, _, port = unquote(name).partition(":")[2].rpartition(":")
    return tcp_connections.place(host.strip("[]"), port)
