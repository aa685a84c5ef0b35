"""An Iceberg REST catalog as the catalog of a lake (`table_catalog.TableCatalog`): Polaris, Lakekeeper, Nessie, and others.

A commit is sent once, and unless the answer is "made", the tables are read to find out what became of it (`read_back`). A
request that got no answer may be carried out much later; that is harmless, because what it requires does not hold then any
more.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from spark_consumers.lake.catalog import read_back
from spark_consumers.lake.catalog.rest_http import NoReplyError, Reply, RestClient, RestOptions
from spark_consumers.lake.catalog.rest_names import (
    copy_at,
    is_encoded,
    own_name,
    plain_name,
    start_of_own_names,
)
from spark_consumers.lake.catalog.table_catalog import (
    LoadedTable,
    Outcome,
    TableCommit,
    TableId,
    assert_ref,
    assert_uuid,
    set_ref,
)
from spark_consumers.lake.catalog.updates import VERSION_PROPERTY
from spark_consumers.lake.store import create as steps
from spark_consumers.lake.store.create import Answer, Creation, Request
from walsender_bridge.errors import (
    CorruptError,
    LakeError,
    NotSupportedError,
    TusklineError,
    UnavailableError,
    UnsupportedByCatalogError,
)

#: Seconds for which the outcome of a commit is looked for, and that of one that some servers always fail at.
_OUTCOME, _PROBE = 30.0, 2.0
_MULTI_TABLE = "POST /v1/{prefix}/transactions/commit"
#: What the names of tables begin with by which a server shows what it can do.
PROBE = "tuskline_probe_"
#: The property by which a table's creation is known.
_CREATION = "tuskline.creation"
#: The property that a server sets to show what it looks at.
_PROBED = "tuskline.probe"
#: The branch by which a server shows whether it keeps branches.
_BRANCH = "tuskline_probe"
_BAD_REQUEST, _NOT_FOUND, _CONFLICT = 400, 404, 409
_OUTCOMES = {
    steps.Outcome.WON: Outcome.WON,
    steps.Outcome.LOST: Outcome.LOST,
    steps.Outcome.UNKNOWN: Outcome.UNKNOWN,
}


class RestCatalog:
    """The tables of one server, by `client`, which is configured. `outcome`: see `_OUTCOME`.

    `prefix`: the namespace that those of the tables are in. `root`: the lake's root as a URI, below which each table has its
    files where a lake in a folder has them (`location`); without it the server chooses.
    """

    is_folder = False

    def __init__(
        self,
        client: RestClient,
        *,
        multi_table: bool = False,
        v3: bool = True,
        branches: bool = True,
        outcome: float = _OUTCOME,
        prefix: Sequence[str] = (),
        root: str = "",
    ) -> None:
        self._client = client
        self.supports_multi_table = multi_table
        self.supports_v3 = v3
        self.supports_branches = branches
        self._outcome = outcome
        self._prefix = tuple(prefix)
        self._root = root
        self._namespaces: set[tuple[str, ...]] = set()
        #: Why a change had no answer that says what became of it, the last time.
        self._unanswered = ""
        #: The names of tables that are not called as their copies are.
        self._called: dict[TableId, str] = {}
        #: Names of tables that the server takes no path with.
        self._refused: set[str] = set()

    @classmethod
    def opened(
        cls,
        options: RestOptions,
        namespace: Sequence[str] = (),
        *,
        outcome: float = _OUTCOME,
        prefix: Sequence[str] = (),
        root: str = "",
    ) -> "RestCatalog":
        """The catalog, after its server has shown what it can do, by a table in `namespace` that is dropped again.

        Raises `NotSupportedError` for a server that makes commits whose requirements do not hold, or puts tables elsewhere.
        """
        client = RestClient(options)
        endpoints = client.configure().get("endpoints")
        # Servers that name none have those of the first version of the specification, this one among them.
        multi_table = endpoints is None or _MULTI_TABLE in endpoints
        catalog = cls(client, multi_table=multi_table, outcome=outcome, prefix=prefix, root=root)
        catalog.check(tuple(namespace))
        return catalog

    @classmethod
    def for_reading(
        cls, options: RestOptions, prefix: Sequence[str], root: str = ""
    ) -> "RestCatalog":
        """The catalog for those who only load tables: nothing is found out."""
        client = RestClient(options)
        client.configure()
        return cls(client, prefix=prefix, root=root)

    def trouble(self) -> TusklineError | None:
        """See `RestClient.trouble`."""
        return self._client.trouble()

    def location(self, table: TableId) -> str:
        """Where the table has its files, as a URI; empty: where the server chooses."""
        if not self._root:
            return ""
        # What is no table of a stream is the lake's own.
        place = ("tables", *table.namespace) if table.namespace else ("_tuskline", "catalog")
        return "/".join((self._root, *place, table.name))

    def load(self, table: TableId) -> LoadedTable | None:
        """See `TableCatalog`."""
        try:
            return self._load(table)
        except NoReplyError as error:
            raise self._client.silent(error) from None

    def create(
        self, table: TableId, schema: Mapping[str, Any], properties: Mapping[str, str]
    ) -> Outcome:
        """See `TableCatalog`. Namespaces are created with their first table."""
        version = int(properties.get(VERSION_PROPERTY, 3 if self.supports_v3 else 2))
        if version >= 3 and not self.supports_v3:
            raise UnsupportedByCatalogError(
                f"the catalog does not support version {version} of Iceberg's format, and thus no deletion vectors",
                where=self._client.where,
                repair='set "copy-on-write" in [lake.deletes], or use another catalog',
            )
        return self._create(table, schema, properties, version)

    def _create(
        self,
        table: TableId,
        schema: Mapping[str, Any],
        properties: Mapping[str, str],
        version: int,
        outcome: float | None = None,
    ) -> Outcome:
        """Create the table; `outcome`: seconds for which the outcome is looked for, if not as long as for all changes."""
        own = uuid.uuid4().hex
        space = self._space(table)
        body: dict[str, Any] = {
            "name": own_name(table),
            "schema": schema,
            "stage-create": False,
            "properties": {**properties, VERSION_PROPERTY: str(version), _CREATION: own},
        }
        if location := self.location(table):
            body["location"] = location
        path = f"{self._client.namespace(space)}/tables"

        def create() -> Answer:
            # Servers say 404 of a table in a namespace that is missing, or 409 as of one that is there.
            self._need_namespace(space)
            return self._answered(self._client.send("POST", path, body))

        def look() -> Answer:
            there = self._load(table)
            if there is None:
                return Answer.NOTHING
            mark = there.metadata.get("properties", {}).get(_CREATION)
            return Answer.OWN if mark == own else Answer.ANOTHERS

        return self._settled(create, look, outcome)

    def commit(self, commit: TableCommit) -> Outcome:
        """See `TableCatalog`."""

        def ask() -> Answer:
            # Its name is that of now: the look at a commit's outcome may have found another one.
            path = self._path(commit.table)
            return self._answered(self._client.send("POST", path, self._change(commit)))

        return self._settled(ask, lambda: self._found(commit))

    def commit_all(self, commits: Sequence[TableCommit]) -> Outcome:
        """See `TableCatalog`."""
        if not self.supports_multi_table:
            raise UnsupportedByCatalogError(
                f"the catalog commits one table at a time, not {len(commits)}",
                where=self._client.where,
                repair="use a catalog that serves transactions/commit",
            )
        if len({commit.table for commit in commits}) != len(commits):
            raise ValueError("a table is changed twice in one commit")
        path = self._client.path("transactions/commit")

        def ask() -> Answer:
            changes = [self._change(commit) for commit in commits]
            return self._answered(self._client.send("POST", path, {"table-changes": changes}))

        return self._settled(ask, lambda: read_back.found_of_all(map(self._found, commits)))

    def drop(self, table: TableId) -> None:
        """See `TableCatalog`. Where the lake has chosen the table's place, its files are the lake's to remove.

        By the copy's own name: a request that is carried out late must not drop the copy that has the table's name then.
        """
        if self._root:
            own, there = own_name(table), self.load(table)
            if there is not None and self._called[table] != own:
                self._rename(table, self._called[table], own)
                there = self.load(table)
            if there is None or self._called[table] != own:
                return
        self._delete(table)

    def _delete(self, table: TableId) -> None:
        """Drop what has the copy's own name."""
        query = {"purgeRequested": "false" if self._root else "true"}
        path = self._client.table(self._space(table), own_name(table))
        reply = self._reply("DELETE", path, query=query)
        self._called.pop(table, None)
        if not reply.is_ok and reply.status != _NOT_FOUND:
            raise self._client.refused(reply)

    def give_name(self, table: TableId) -> bool:
        """Have the copy called as its table is, in place of another copy; False if something else has the name.

        Renaming knows no requirements: a suspended writer may do it late. So tables are found by where their files are
        (`_load`), whatever they are called, and the caller looks at the names again and again.
        """
        plain = plain_name(table)
        there = self.load(table)
        if there is None or self._called.get(table) == plain:
            return there is not None
        other = self._at(table, plain)
        if plain in self._refused:
            # A rename would be made, since its names are not in the path, and the table not be found again.
            return False
        if other is not None:
            copy = copy_at(str(other.metadata["location"]), self._root)
            if copy is None:
                return False
            self._rename(table, plain, own_name(copy))
        self._rename(table, self._called.get(table, own_name(table)), plain)
        return self.load(table) is not None and self._called.get(table) == plain

    def _rename(self, table: TableId, name: str, to: str) -> None:
        """Rename a table in the namespace of `table`. One that is not there, or a name that is taken or not accepted, is left as it is."""
        space = list(self._space(table))
        body = {
            "source": {"namespace": space, "name": name},
            "destination": {"namespace": space, "name": to},
        }
        try:
            reply = self._client.send("POST", self._client.path("tables/rename"), body)
        except NoReplyError as error:
            raise self._client.silent(error) from None
        if not reply.is_ok and reply.status not in {_BAD_REQUEST, _NOT_FOUND, _CONFLICT}:
            raise self._client.refused(reply)

    def check(self, namespace: tuple[str, ...]) -> None:
        """Find out what the server can do. Raises `NotSupportedError` if a false requirement does not stop a commit."""
        table = TableId(namespace, f"{PROBE}{uuid.uuid4().hex}")
        try:
            self.supports_v3 = self._creates_v3(table)
            self._check_place(table)
            update = _set_property(_PROBED)
            for required in (assert_uuid(str(uuid.uuid4())), assert_ref("main", 1)):
                if self.commit(TableCommit(table, [required], [update])) is not Outcome.LOST:
                    raise NotSupportedError(
                        f"the catalog accepts a commit although its requirement does not hold ({required['type']})",
                        where=self._client.where,
                        repair="use another catalog: two writers would overwrite each other's tables",
                    )
            self.supports_branches = self._keeps_branches(table)
            if self.supports_multi_table:
                self.supports_multi_table = self._makes_commits_whole(table)
        finally:
            self._delete(table)
        # What it lacks is known from here on, and is done without.
        self._client.forget_trouble()

    def _creates_v3(self, table: TableId) -> bool:
        """Create an empty table; whether it has version 3. Other servers refuse it, fail, or give the table version 2."""
        column = {"id": 1, "name": "probe", "type": "int", "required": False}
        schema = {"type": "struct", "schema-id": 0, "fields": [column]}
        with suppress(LakeError, UnsupportedByCatalogError):
            self._create(table, schema, {}, 3, _PROBE)
        there = self._seen(table)
        if there is None:
            if self._create(table, schema, {}, 2) is not Outcome.WON:
                raise UnavailableError(
                    f"the catalog does not create tables: {self._unanswered or 'it gives no reason'}",
                    where=self._client.where,
                    repair="check the catalog's log; its server must be able to write to the location of the lake's tables",
                )
            return False
        return bool(there.metadata["format-version"] >= 3)

    def _check_place(self, table: TableId) -> None:
        there, wanted = self._seen(table), self.location(table)
        found = str(there.metadata["location"]) if there is not None else ""
        if wanted and found.rstrip("/") != wanted:
            raise NotSupportedError(
                f"the catalog puts a table at {found or 'no location'}, not at {wanted}",
                where=self._client.where,
                repair="configure the catalog's warehouse to contain the lake (docs/rest-catalog.md)",
            )

    def _seen(self, table: TableId) -> LoadedTable | None:
        """What has the copy's own name, wherever its files are."""
        try:
            return self._at(table, own_name(table))
        except NoReplyError as error:
            raise self._client.silent(error) from None

    def _keeps_branches(self, table: TableId) -> bool:
        """Whether a branch that a commit makes is there after it: some servers make the commit without it."""
        there = self.load(table)
        assert there is not None
        metadata = there.metadata
        number = uuid.uuid4().int >> 65
        record = {
            "snapshot-id": number,
            "sequence-number": metadata["last-sequence-number"] + 1,
            "timestamp-ms": metadata["last-updated-ms"] + 1,
            # Nobody opens it: the table is dropped.
            "manifest-list": f"{metadata['location']}/metadata/snap-{number}.avro",
            "schema-id": metadata["current-schema-id"],
            "summary": {"operation": "append"},
        }
        if metadata["format-version"] >= 3:
            record |= {"first-row-id": metadata["next-row-id"], "added-rows": 0}
        updates = [
            {"action": "add-snapshot", "snapshot": record},
            set_ref(_BRANCH, number, "branch"),
        ]
        required = [assert_uuid(metadata["table-uuid"])]
        with suppress(LakeError, UnsupportedByCatalogError):
            self.commit(TableCommit(table, required, updates))
        there = self.load(table)
        return there is not None and _BRANCH in there.metadata.get("refs", {})

    def _makes_commits_whole(self, table: TableId) -> bool:
        """Whether a commit of several changes that is said to be made has all of them.

        Iceberg's own server, which others began with, leaves out the change of a table that was changed since the request began, and
        says that it is made: a writer that is taken over meanwhile would take its epoch for shown. Two changes of one table
        bring that about. A server may refuse these.
        """
        names = [f"{_PROBED}.{number}" for number in range(2)]
        there = self.load(table)
        assert there is not None
        required = [assert_uuid(there.metadata["table-uuid"])]
        changes = [
            self._change(TableCommit(table, required, [_set_property(name)])) for name in names
        ]
        path, is_ok = self._client.path("transactions/commit"), False
        with suppress(NoReplyError, LakeError, UnsupportedByCatalogError):
            is_ok = self._client.send("POST", path, {"table-changes": changes}).is_ok
        there = self._seen(table)
        properties = there.metadata.get("properties", {}) if there is not None else {}
        found = [name in properties for name in names]
        return all(found) or not (is_ok or any(found))

    # -- requests -----------------------------------------------------------------------------------

    def _settled(
        self, ask: Callable[[], Answer], look: Callable[[], Answer], outcome: float | None = None
    ) -> Outcome:
        """Send a change, and find out what became of it. The steps are `store.create`'s."""
        deadline = time.monotonic() + (self._outcome if outcome is None else outcome)
        change = Creation()
        while True:
            time.sleep(change.pause)
            try:
                answer = ask() if change.request is Request.CREATE else look()
            except NoReplyError as error:
                answer, self._unanswered = Answer.NO_ANSWER, str(error)
            made = steps.step(change, answer, late=time.monotonic() >= deadline)
            if isinstance(made, steps.Outcome):
                return _OUTCOMES[made]
            change = made

    def _answered(self, reply: Reply) -> Answer:
        """A change's answer. A table that does not exist (any more) is as one that has changed."""
        if reply.is_ok:
            return Answer.CREATED
        if reply.status in {_CONFLICT, _NOT_FOUND}:
            return Answer.EXISTS
        raise self._client.refused(reply)

    def _found(self, commit: TableCommit) -> Answer:
        there = self._load(commit.table)
        return read_back.found(commit, there.metadata if there is not None else None)

    def _load(self, table: TableId) -> LoadedTable | None:
        """The table, by whatever name. Raises `NoReplyError`."""
        own = own_name(table)
        known = self._called.get(table, own)
        for name in dict.fromkeys((known, own, plain_name(table))):
            if (found := self._called_by(table, name)) is not None:
                return found
        if not self._root or not table.namespace:
            return None
        # Another writer has called it as an earlier copy is called.
        reply = self._client.send("GET", f"{self._client.namespace(self._space(table))}/tables")
        for each in reply.body.get("identifiers", ()) if reply.is_ok else ():
            if each["name"].startswith(start_of_own_names(table)):
                found = self._called_by(table, each["name"])
                if found is not None:
                    return found
        return None

    def _called_by(self, table: TableId, name: str) -> LoadedTable | None:
        """The table of this name, if it is that one by the place of its files."""
        found = self._at(table, name)
        wanted = self.location(table)
        if found is None or (wanted and found.metadata["location"].rstrip("/") != wanted):
            return None
        self._called[table] = name
        return found

    def _at(self, table: TableId, name: str) -> LoadedTable | None:
        """The table of this name in the namespace of `table`. Raises `NoReplyError`."""
        reply = self._client.send("GET", self._client.table(self._space(table), name))
        if reply.status == _NOT_FOUND:
            return None
        if reply.status == _BAD_REQUEST and is_encoded(name):
            self._refused.add(name)
            return None
        if not reply.is_ok:
            raise self._client.refused(reply)
        metadata = reply.body.get("metadata")
        if not isinstance(metadata, Mapping):
            raise CorruptError(
                f"the catalog returns no metadata of {table}", where=self._client.where
            )
        location = str(reply.body.get("metadata-location") or "")
        return LoadedTable(location, metadata, _config(reply.body, str(metadata["location"])))

    def _need_namespace(self, parts: tuple[str, ...]) -> None:
        """Create the namespace, and those that it is in, unless this client has seen it. Raises `NoReplyError`."""
        if parts in self._namespaces:
            return
        for depth in range(1, len(parts) + 1):
            body = {"namespace": list(parts[:depth]), "properties": {}}
            reply = self._client.send("POST", self._client.path("namespaces"), body)
            if not reply.is_ok and reply.status != _CONFLICT:
                raise self._client.refused(reply)
        self._namespaces.add(parts)

    def _reply(self, method: str, path: str, *, query: Mapping[str, str]) -> Reply:
        try:
            return self._client.send(method, path, query=query)
        except NoReplyError as error:
            raise self._client.silent(error) from None

    def _space(self, table: TableId) -> tuple[str, ...]:
        return (*self._prefix, *map(unquote, table.namespace))

    def _path(self, table: TableId) -> str:
        return self._client.table(self._space(table), self._called.get(table, own_name(table)))

    def _change(self, commit: TableCommit) -> dict[str, Any]:
        name = self._called.get(commit.table, own_name(commit.table))
        return {
            "identifier": {"namespace": list(self._space(commit.table)), "name": name},
            "requirements": list(commit.requirements),
            "updates": list(commit.updates),
        }


def _set_property(name: str) -> dict[str, Any]:
    return {"action": "set-properties", "updates": {name: "1"}}


def _config(body: Mapping[str, Any], location: str) -> dict[str, str]:
    """FileIO's settings for a table: the server's, and of the credentials those whose prefix is the longest."""
    fitting = [
        each
        for each in body.get("storage-credentials") or ()
        if location.startswith(each.get("prefix", ""))
    ]
    best: Mapping[str, Any] = max(fitting, key=lambda each: len(each.get("prefix", "")), default={})
    return {**body.get("config", {}), **best.get("config", {})}
