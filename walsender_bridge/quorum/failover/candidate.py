"""The candidate of a failover as a server: probed, configured, promoted, by SQL and replication commands.

The role must be a superuser, or have been granted `pg_read_all_settings`, `pg_promote()`, `pg_reload_conf()` and
ALTER SYSTEM on the settings below. Every operation is idempotent.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from walsender_bridge.errors import NotSupportedError
from walsender_bridge.postgres.client.bounded_query import BoundedConnection
from walsender_bridge.postgres.client.replication_connection import describe
from walsender_bridge.postgres.protocol.refusals import connection_error, server_error
from walsender_bridge.postgres.standby_names import StandbyNames
from walsender_bridge.quorum.failover.plan import PromotionCandidate
from walsender_bridge.quorum.proposer.primary.wal_source import StandbyStream
from walsender_bridge.quorum.protocol.messages import ServerInfo
from walsender_bridge.runtime.sql import load

#: From this major on a standby takes another `primary_conninfo` with a reload.
_RELOADS = 13
#: From this major on SQL promotes.
_PROMOTES = 12
#: Seconds between two polls of the candidate while it carries out a request.
_POLL_SECONDS = 0.05


class CandidateServer:
    """See the module. `upstream`: the libpq connection string of the safekeepers' WAL servers, for the standby.

    `promote`: promotes a server without SQL (11: `pg_ctl promote`, or whatever the operator prefers).
    `slot`: its physical slot on the old primary. It streams from a safekeeper without a slot, and sets the name again
    once it is a primary, so that a commit gate can identify it.
    """

    def __init__(
        self,
        dsn: str,
        application_name: str,
        upstream: str,
        promote: Callable[[], object] | None = None,
        slot: str | None = None,
    ) -> None:
        self.dsn = dsn
        self.where = describe(dsn)
        self._application_name = application_name
        self._upstream = upstream
        self._ports = {
            int(port or 5432)
            for port in str(conninfo_to_dict(upstream).get("port") or "5432").split(",")
        }
        self._promote = promote
        self._slot = slot

    def server_info(self) -> ServerInfo:
        """The server whose WAL it has. Raises what `PrimaryStream` raises."""
        with StandbyStream.connect(self.dsn) as asked:
            return asked.server_info()

    def probe(self) -> PromotionCandidate:
        """Its present state. Raises `ConnectionFailedError` and what `ReplicationConnection` raises."""
        with StandbyStream.connect(self.dsn) as asked:
            seen = asked.primary()
            major = asked.server_version // 10000
        with self._connect() as connection:
            row = connection.execute(load("gate/candidate").encode()).fetchone()
        assert row is not None
        in_recovery, replay_lsn, names, level, upstream, slot, restores, paused, senders = row
        follows: bool | None = None
        if major >= _RELOADS:
            follows = upstream == self._upstream and self._ports.issuperset(senders or ())
            # It was pointed at the safekeepers by hand, or by an earlier version: no safekeeper has that slot.
            follows = follows and (not slot or slot != self._slot)
        return PromotionCandidate(
            in_recovery=in_recovery,
            lineage=seen.lineage,
            end_lsn=seen.flush_lsn,
            replay_lsn=int(replay_lsn or 0),
            guarded=StandbyNames.parse(names).needs(self._application_name)
            and level not in {"off", "local"},
            follows=follows,
            restores=restores,
            paused=paused,
        )

    def guard(self) -> None:
        """Make its commits wait for the proposer from the moment that it is a primary."""
        self._set(
            synchronous_standby_names=str(StandbyNames.all_of(self._application_name)),
            synchronous_commit="on",
        )

    def follow(self, seconds: float) -> None:
        """Stream from a safekeeper. This stays in place if the failover is aborted: safekeepers serve committed WAL only."""
        # The slot first: no safekeeper has it, and a run that is killed here leaves a standby of the old primary.
        self._set(primary_slot_name="", primary_conninfo=self._upstream)
        self._until(lambda seen: seen.follows is not False, seconds)

    def promote(self, seconds: float) -> None:
        """Promote it. Raises `NotSupportedError` on 11 without a `promote` command."""
        if self._promote is not None:
            self._promote()
            return
        with self._connect() as connection:
            if connection.info.server_version // 10000 < _PROMOTES:
                raise NotSupportedError(
                    "a server of major 11 cannot be promoted by SQL",
                    where=self.where,
                    repair="run pg_ctl promote on that server, then repeat this command",
                )
            connection.execute("SELECT pg_catalog.pg_promote(false)")
        self._until(lambda seen: not seen.in_recovery, seconds)

    def name_slot(self) -> None:
        """Once it is a primary that a failover had follow the safekeepers: name the slot that it had, for a commit gate.

        Not before: a standby that names a slot which no safekeeper has would stream from nobody if the failover is taken
        back.
        """
        if not self._slot:
            return
        with self._connect() as connection:
            major = connection.info.server_version // 10000
            row = connection.execute(load("gate/candidate").encode()).fetchone()
        assert row is not None
        in_recovery, upstream, named = row[0], row[4], row[5]
        followed = not in_recovery and upstream == self._upstream
        if major >= _RELOADS and followed and named != self._slot:
            self._set(primary_slot_name=self._slot)

    def _until(self, reached: Callable[[PromotionCandidate], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not reached(self.probe()):
            time.sleep(_POLL_SECONDS)

    def _set(self, **settings: str) -> None:
        with self._connect() as connection:
            for name, value in settings.items():
                connection.execute(
                    sql.SQL("ALTER SYSTEM SET {} = {}").format(
                        sql.Identifier(name), sql.Literal(value)
                    )
                )
            connection.execute("SELECT pg_catalog.pg_reload_conf()")

    @contextlib.contextmanager
    def _connect(self) -> Iterator[BoundedConnection]:
        try:
            with BoundedConnection.open(self.dsn) as connection:
                yield connection
        except psycopg.OperationalError as error:
            if error.sqlstate is None:
                raise connection_error(str(error), self.where) from None
            raise server_error(error.sqlstate, str(error), self.where) from None
        except psycopg.Error as error:
            raise server_error(error.sqlstate or "", str(error), self.where) from None
