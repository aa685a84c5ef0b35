"""An ordinary connection on which no call blocks longer than a limit, whatever the server does.

A server that is stopped, or whose disk hangs, does not answer, but its kernel still acknowledges every byte:
neither keepalives nor `tcp_user_timeout` detect it, and `statement_timeout` is enforced by the server, which is stopped.
So the limit is enforced here, by the client's clock.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.rows import TupleRow

from walsender_bridge.errors import DeadlineError
from walsender_bridge.postgres.client.replication_connection import (
    ANSWER_SECONDS,
    describe,
    pinned_conninfo,
)

#: Seconds between two checks of the clock while waiting for an answer.
_POLL_SECONDS = 0.1

_T = TypeVar("_T")


class BoundedConnection(psycopg.Connection[TupleRow]):
    """A psycopg connection on which each call ends within `limit` seconds.

    Otherwise it raises `DeadlineError` and closes the connection. Connecting has a limit of its
    own: the DSN's `connect_timeout`.
    """

    limit = ANSWER_SECONDS

    @classmethod
    def open(cls, dsn: str) -> Self:
        """Connect in autocommit, within the DSN's `connect_timeout` (10 s). Raises psycopg's errors, `ConfigError`."""
        return cls.connect(pinned_conninfo(dsn), autocommit=True)

    @contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """In the block each call may take so long: the query is known to take its time."""
        before, self.limit = self.limit, seconds
        try:
            yield
        finally:
            self.limit = before

    def wait(self, gen: PQGen[_T], *arguments: Any, **options: Any) -> _T:
        """Drive one of psycopg's generators until it ends or the limit is reached."""
        del arguments, options
        return super().wait(self._bounded(gen), interval=_POLL_SECONDS)

    def _bounded(self, gen: PQGen[_T]) -> PQGen[_T]:
        deadline = time.monotonic() + self.limit
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > deadline:
                    raise self._given_up()
                wanted = gen.send(ready)
        except StopIteration as end:
            result: _T = end.value
            return result

    def _given_up(self) -> DeadlineError:
        where = describe(self.info.dsn)
        self.close()
        return no_answer(self.limit, where)


def no_answer(seconds: float, where: str) -> DeadlineError:
    """The error for a server that has received a query and does not answer."""
    return DeadlineError(
        f"the server did not answer in {seconds:.0f} s",
        where=where,
        repair="check whether it is stopped, or its disk hangs",
    )
