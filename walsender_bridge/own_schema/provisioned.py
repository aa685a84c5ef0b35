"""What Tuskline has made on a server, recorded in the server: the table `tuskline.provisioned`.

Invariant: what detach takes back was made by Tuskline. A thing and its record are committed together, or
(a slot, which no transaction holds) the record comes first and may stand for nothing.

What one source alone uses (slot, publication, tables added to a publication that was there) is recorded
under its slot; so is the OID of its publication, also of one that was there: under the same name another one could take its
place, and what was committed meanwhile is missing. What all sources of a database share (schema, role, grants) is recorded under no slot, and
is taken back with the last of them.

Who may write the record could name in it what is not ours. So whoever takes back acts as the record's owner
(`SET ROLE`), who could have done the same without it. Nor may its owner have code run by whoever reads or writes
it: each access is one of `own_tables.check`, in the same transaction.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from walsender_bridge.own_schema import own_tables
from walsender_bridge.runtime.sql import load

#: Kinds that belong to one source; the others belong to all sources of the database.
OF_ONE_SOURCE: Final = (
    *("slot", "publication", "published", "publication oid"),
    # What the quorum of safekeepers needs, under the slot that keeps WAL for them (`quorum`); the last for gates, too.
    *("setting", "physical slot", "member", "quorum"),
)
#: The table itself.
PROVISIONED_TABLE: Final = "tuskline.provisioned"
#: The kind whose name is the id of the quorum that the server's commits are on, in hexadecimal.
QUORUM: Final = "quorum"
#: The kind of a row that says which publication a slot began with, `grantee` its OID. Nothing is made by it, or taken back.
PUBLICATION_OID: Final = "publication oid"


@dataclass(frozen=True, slots=True)
class ProvisionedObject:
    """One thing: `kind` is schema, slot, publication, published, role, or what a grant is on.

    Or quorum, physical slot, setting, member (a role that was made a member of pg_read_all_stats). `name` is as the
    catalog writes it (tables: `relation_name`). `grantee` is the role of a grant, the publication that a table
    was added to, or `=` and what ALTER SYSTEM had set a setting to (empty: nothing); `privilege` the privilege
    that was granted.
    """

    kind: str
    name: str
    privilege: str = ""
    grantee: str = ""

    def __str__(self) -> str:
        if self.privilege:
            return f"{self.privilege} on {self.kind} {self.name} for {self.grantee}"
        if self.kind == "published":
            return f"table {self.name} in publication {self.grantee}"
        if self.kind == "member":
            return f"membership of {self.name} in pg_read_all_stats"
        return f"{self.kind} {self.name}"


class ProvisionedRecord:
    """The record of one source, on a connection to its database; `dsn` is the source's own. All raise `PrivilegeError`."""

    def __init__(self, connection: psycopg.Connection[Any], slot: str, dsn: str) -> None:
        self._connection = connection
        self._slot = slot
        self._dsn = dsn
        self._held = False
        row = connection.execute(load("own_schema/provisioned_owner").encode()).fetchone()
        #: The record's owner; None: nothing was ever made here.
        self.owner: str | None = row and row[0]
        #: Whose rights the connection has.
        self.user: str | None = row and row[1]
        self._writable = bool(row and row[2])
        #: Whether it can be read at all.
        self.readable = bool(row and row[3])

    def add(self, made: ProvisionedObject) -> None:
        """Record a thing. Without the right to, nothing is recorded: it is not for detach to take back."""
        if not self._writable:
            return
        self._ask(
            "own_schema/provisioned_insert",
            slot=self._slot if made.kind in OF_ONE_SOURCE else "",
            kind=made.kind,
            name=made.name,
            privilege=made.privilege,
            grantee=made.grantee,
        )

    def own(self) -> list[ProvisionedObject]:
        """What was made for this source alone."""
        return [made for made in self._list(self._slot) if made.kind != PUBLICATION_OID]

    def publication_oid(self, name: str) -> int | None:
        """The OID of the publication that the source's slot began with; None: not recorded, or not this role's to read."""
        if not self.readable:
            return None
        found = [m for m in self._list(self._slot) if (m.kind, m.name) == (PUBLICATION_OID, name)]
        return int(found[0].grantee) if found and found[0].grantee.isdecimal() else None

    def keep_publication_oid(self, name: str, oid: int) -> None:
        """Record it, in place of another, as far as the role may."""
        if not self._writable or self.publication_oid(name) == oid:
            return
        with self.held():
            self._ask(
                "own_schema/provisioned_forget_kind",
                slot=self._slot,
                kind=PUBLICATION_OID,
                name=name,
            )
            self.add(ProvisionedObject(PUBLICATION_OID, name, grantee=str(oid)))

    def shared(self) -> list[ProvisionedObject]:
        """What all sources of this database use."""
        return self._list("")

    def recorded_elsewhere(self, made: ProvisionedObject) -> bool:
        """Whether the same is recorded for something else of this database."""
        if not self.readable:
            return False
        row = self._ask(
            "own_schema/provisioned_others", slot=self._slot, kind=made.kind, name=made.name
        ).fetchone()
        return row is not None and row[0]

    def is_last(self) -> bool:
        """Whether no other source of this database has made anything."""
        row = self._ask("own_schema/provisioned_rest", slot=self._slot).fetchone()
        return row is not None and row[0] == 0

    def forget(self) -> None:
        """Remove the rows of this source."""
        self._ask("own_schema/provisioned_forget", slot=self._slot)

    def quorum_ids(self) -> set[int]:
        """The ids of quorums that this server's commits are on: one, or none."""
        return {int(name, 16) for (name,) in self._ask("quorum/id")}

    def forget_quorum(self) -> None:
        """Remove the quorum's id, whichever source's slot it is recorded under."""
        self._ask("quorum/id_forget")

    @contextmanager
    def held(self) -> Iterator[None]:
        """A transaction in which the tables of the schema may be used and stay as they are, also under another role."""
        if self._held:
            yield
            return
        with self._connection.transaction():
            own_tables.check(self._connection, self._dsn)
            self._held = True
            try:
                yield
            finally:
                self._held = False

    def _ask(self, text: str, **values: str) -> psycopg.Cursor[Any]:
        with self.held():
            return self._connection.execute(load(text).encode(), values or None)

    def _list(self, slot: str) -> list[ProvisionedObject]:
        return [
            ProvisionedObject(*row) for row in self._ask("own_schema/provisioned_list", slot=slot)
        ]
