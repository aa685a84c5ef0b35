"""The record of the objects that Tuskline has provisioned on a server: the table `tuskline.provisioned`.

Invariant: detach removes only objects created by Tuskline. An object and its record are committed together, except for
a slot, which is not transactional: it is recorded first, so that a record may exist without its slot.

Objects of one source (slot, publication, tables added to an existing publication) are recorded
under its slot; so is the OID of its publication, even of one that existed before: another publication could take its
name, and the changes committed in between would be missing. Objects shared by all sources of a database (schema, role, grants)
are recorded under an empty slot name, and removed with the last source.

A role that can write the record could list objects in it that are not Tuskline's. So detach acts as the record's owner
(`SET ROLE`), who could remove them anyway. Nor may the record's owner have code run by a session that reads or writes
it: each access is preceded by `own_tables.check` in the same transaction.
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
    # For the quorum of safekeepers, under the slot that keeps WAL for them (`quorum`); `member` for commit gates, too.
    *("setting", "physical slot", "member", "quorum"),
)
#: The table itself.
PROVISIONED_TABLE: Final = "tuskline.provisioned"
#: The kind whose name is the id of the quorum that has the server's commits, in hexadecimal.
QUORUM: Final = "quorum"
#: The kind that records the publication a slot started with, `grantee` its OID. It is not an object, and detach ignores it.
PUBLICATION_OID: Final = "publication oid"


@dataclass(frozen=True, slots=True)
class ProvisionedObject:
    """A provisioned object: `kind` is schema, slot, publication, published, role, or the kind of object of a grant.

    Or event trigger, quorum, physical slot, setting, member (a role granted membership of pg_read_all_stats). `name` is as in the
    catalog (tables: `relation_name`). `grantee` is the role of a grant, the publication that a table
    was added to, or `=` and the value that ALTER SYSTEM had set before (empty: none); `privilege` is the privilege
    granted.
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
        #: The record's owner; None if nothing has been provisioned in this database.
        self.owner: str | None = row and row[0]
        #: The role whose rights the connection has.
        self.user: str | None = row and row[1]
        self._writable = bool(row and row[2])
        #: Whether the record is readable.
        self.readable = bool(row and row[3])

    def add(self, made: ProvisionedObject) -> None:
        """Record an object. Without the right to write the record this does nothing, and detach leaves the object alone."""
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
        """The objects of this source alone."""
        return [made for made in self._list(self._slot) if made.kind != PUBLICATION_OID]

    def publication_oid(self, name: str) -> int | None:
        """The OID of the publication that the source's slot started with; None if not recorded or not readable."""
        if not self.readable:
            return None
        found = [m for m in self._list(self._slot) if (m.kind, m.name) == (PUBLICATION_OID, name)]
        return int(found[0].grantee) if found and found[0].grantee.isdecimal() else None

    def keep_publication_oid(self, name: str, oid: int) -> None:
        """Record the OID, replacing any other, if the role has the right to."""
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
        """The objects shared by all sources of this database."""
        return self._list("")

    def recorded_elsewhere(self, made: ProvisionedObject) -> bool:
        """Whether the same object is also recorded under another slot of this database."""
        if not self.readable:
            return False
        row = self._ask(
            "own_schema/provisioned_others", slot=self._slot, kind=made.kind, name=made.name
        ).fetchone()
        return row is not None and row[0]

    def is_last(self) -> bool:
        """Whether no other source of this database has provisioned objects."""
        row = self._ask("own_schema/provisioned_rest", slot=self._slot).fetchone()
        return row is not None and row[0] == 0

    def forget(self) -> None:
        """Remove the rows of this source."""
        self._ask("own_schema/provisioned_forget", slot=self._slot)

    def quorum_ids(self) -> set[int]:
        """The ids of quorums recorded on this server: one, or none."""
        return {int(name, 16) for (name,) in self._ask("quorum/id")}

    def forget_quorum(self) -> None:
        """Remove the quorum's id, whichever source's slot it is recorded under."""
        self._ask("quorum/id_forget")

    @contextmanager
    def held(self) -> Iterator[None]:
        """A transaction in which the schema's tables are safe to use and cannot be redefined, even after SET ROLE."""
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
