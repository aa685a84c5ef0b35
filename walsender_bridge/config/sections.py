"""The sections of the configuration file, each a strict value: its keys with their units and defaults."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from walsender_bridge.postgres.change_feed import parse_feed
from walsender_bridge.postgres.column_masks import parse_masks
from walsender_bridge.postgres.protocol.relation_name import relation_name
from walsender_bridge.postgres.table_layout import (
    CURRENT,
    MODES,
    LayoutRule,
    TableLayout,
)
from walsender_bridge.postgres.table_patterns import Choice, Pattern
from walsender_bridge.postgres.target_name import parse_name, target_name
from walsender_bridge.runtime.tls_files import TlsFiles


def _host_and_port(address: str) -> str:
    if not re.fullmatch(r"[^\s/]+:[0-9]{1,5}", address):
        raise ValueError(f"{address!r:.80} is not of the form host:port")
    port = int(address.rpartition(":")[2])
    if not 1 <= port <= 65_535:
        raise ValueError(f"{port} is not a port: 1 to 65535")
    return address


#: A stream's name is a folder name, a Flight path and an Iceberg namespace, so it is kept plain.
StreamName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
SlotName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,63}$")]
HostPort = Annotated[str, AfterValidator(_host_and_port)]


Bytes = Annotated[int, Field(ge=0)]
#: The name of a view, and that of its schema: alike in PostgreSQL, Spark and Iceberg.
_VIEW_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
#: A standby's application_name; in `synchronous_standby_names` it needs no quotes.
StandbyName = Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_]{0,62}$")]


def first_repeated(names: tuple[str, ...]) -> str:
    """The first name that is there more than once; empty if none is."""
    return next((each for each in names if names.count(each) > 1), "")


def split_address(address: str) -> tuple[str, int]:
    """Host and port of a `HostPort`; an IPv6 address loses its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


#: A part of Tuskline that `[machine] parts` can name.
Part = Literal["repository", "bridge", "log-server", "safekeepers", "lake", "slots"]


class MachineSection(_Section):
    """`[machine]`: the parts that run on this machine; what else the file describes is on other machines.

    Without it, the file describes one machine, and all that it describes runs there.
    """

    #: Where the parts here keep their state files, logs, spools and decisions.
    data_dir: Path
    parts: tuple[Part, ...] = Field(min_length=1)
    #: Whether other machines have a bridge of the same sources. All of them say so, and one is active, elected in `[etcd]`.
    elect_bridge: bool = False


class LogSection(_Section):
    """`[log]`: the metadata repository, and settings of the whole change log."""

    #: Where the repository is kept; without `[machine]`, also what `[machine] data_dir` says.
    data_dir: Path | None = None
    #: Where the repository listens, `host:port`.
    listen: HostPort = "127.0.0.1:7400"
    #: Where the repository keeps its records: in `data_dir`, or in the cluster of `[etcd]`.
    store: Literal["sqlite", "etcd"] = "sqlite"
    #: With etcd: the addresses of all repositories of this log, one of which leads; by default `listen` alone.
    repositories: tuple[HostPort, ...] = ()
    #: Seconds that committed entries are kept for consumers without a lease.
    retention: float = Field(default=86_400.0, gt=0)
    #: The number of log servers that each stream is written to; by default all, up to three.
    replicas: int | None = Field(default=None, ge=1)
    #: With fewer of them in sync, nothing is captured; by default one less than `replicas`.
    min_replicas: int | None = Field(default=None, ge=1)
    #: Seconds without an answer after which a stream goes on without a log server.
    replica_timeout: float = Field(default=10.0, ge=1)


class EtcdSection(_Section):
    """`[etcd]`: the cluster that keeps the repository's records, with `[log] store = "etcd"`, and elects the bridge."""

    #: `host:port` of each member.
    endpoints: tuple[HostPort, ...] = Field(min_length=1)
    #: What the keys of this log begin with.
    prefix: Annotated[str, StringConstraints(pattern=r"^/([a-zA-Z0-9_.-]+/)+$")] = "/tuskline/"
    #: Seconds after which another repository may lead if the one that leads is silent.
    lease: float = Field(default=5.0, ge=2, le=60)
    #: etcd's authority, and the certificate and key with which the repository proves to etcd who it is.
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len({each is None for each in (self.ca, self.certificate, self.key)}) > 1:
            raise ValueError("ca, certificate and key belong together")
        return self

    @property
    def tls_files(self) -> TlsFiles | None:
        """The three files; None: no TLS."""
        if self.ca is None or self.certificate is None or self.key is None:
            return None
        return TlsFiles(self.ca, self.certificate, self.key)


class GateSection(_Section):
    """`[gate]`, or `[source.gate]` for one source: the standbys that must have a transaction before consumers may see it."""

    #: The names, on the primary, of the physical slots of the failover candidates.
    candidates: tuple[SlotName, ...] = ()
    #: Instead of `candidates`, where slots are named by member: the slots of all members, including the server's own.
    members: tuple[SlotName, ...] = ()
    #: How many of them must have a transaction; all by default.
    quorum: int | None = Field(default=None, ge=1)
    #: While a required candidate is away: `block` waits for it; `degrade` continues without it, and records that.
    on_missing: Literal["block", "degrade"] = "block"
    #: Seconds that it may be away before the gate degrades.
    degrade_after: float = Field(default=60.0, ge=0)
    #: Whether the quorum of `[safekeepers]` must have it too.
    safekeepers: bool = True
    #: Bytes of uncommitted WAL in the log beyond which capture stops reading, and the primary retains the WAL.
    max_uncommitted_bytes: int = Field(default=16 << 30, ge=1 << 20)

    @model_validator(mode="after")
    def _has_so_many(self) -> Self:
        if self.candidates and self.members:
            raise ValueError("candidates and members exclude each other")
        if len(self.members) == 1:
            raise ValueError("members must list all members, including the primary")
        if twice := first_repeated(self.names):
            raise ValueError(f"{twice} is listed twice, and would count twice")
        others = len(self.names) - bool(self.members)
        if (self.quorum or 0) > others:
            raise ValueError(
                f"quorum is {self.quorum}, more than the number of candidates ({others})"
            )
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The slots that the gate polls."""
        return self.candidates or self.members


class SourceSection(_Section):
    """`[[source]]`: one database that is captured into one log stream."""

    name: StreamName
    #: A libpq connection string: a URI, `key=value` pairs, `service=`; a password is better kept in `.pgpass`. With several
    #: hosts, the one that accepts writes is used.
    dsn: str
    #: `schema.table`, with `*` for any characters, and `!` before what is excluded (`postgres.table_patterns`); nothing that
    #: includes means every table that can be published.
    tables: tuple[str, ...] = ()
    slot: SlotName | None = None
    publication: str | None = None
    #: Bytes on disk for large transactions that have not committed yet (PostgreSQL 14 and later send them
    #: while they are in progress). 0: the server keeps them on its own disk instead.
    spool_limit: int = Field(default=64 << 30, ge=0)
    #: The gate of this source; by default that of `[gate]`.
    gate: GateSection | None = None

    @field_validator("dsn")
    @classmethod
    def _takes_writes(cls, dsn: str) -> str:
        if "," not in dsn:
            return dsn
        from walsender_bridge.postgres.client.hosts import primary_dsn

        return primary_dsn(dsn)

    @field_validator("tables")
    @classmethod
    def _are_patterns(cls, tables: tuple[str, ...]) -> tuple[str, ...]:
        Choice.of(tables)
        return tables

    @property
    def slot_name(self) -> str:
        """The logical slot, `tuskline_<name>` unless configured."""
        return self.slot or f"tuskline_{self.name}"

    @property
    def publication_name(self) -> str:
        """The publication, `tuskline_<name>` unless configured."""
        return self.publication or f"tuskline_{self.name}"


class LogServerSection(_Section):
    """`[[log_server]]`: a service that keeps replicas of the log streams."""

    listen: HostPort
    #: Where this machine keeps them; a log server without it runs on another machine.
    data_dir: Path | None = None


class LakeTablesSection(_Section):
    """`[[lake.tables]]`: partitions, order of rows, Iceberg's properties, masks, mode, row filter, change feeds and Delta logs of the tables that match."""

    #: As in the `tables` of a source: schema.table, with `*`.
    pattern: str
    #: The source of the tables; by default all.
    source: StreamName | None = None
    #: Columns, or transforms of columns: `region`, `day(created_at)`, `bucket(16, id)`.
    partition: tuple[str, ...] = ()
    #: Columns by which the rows of a data file are sorted: `created_at DESC NULLS LAST`.
    sort: tuple[str, ...] = ()
    #: Iceberg's table properties.
    options: dict[str, str] = {}
    #: Columns that are masked: "hash", "drop", or { constant = "..." }.
    mask: dict[str, str | dict[str, str]] = {}
    #: "current"; "soft_delete": deleted rows are kept, with the time of their deletion; or "history": all versions of each row are kept.
    mode: str = CURRENT
    #: A condition in PostgreSQL's SQL: the lake has the rows that meet it.
    rows: str = ""
    #: Whether each table has a change feed beside it; or how feeds are named, if not "{table}_changes".
    feed: bool | str = False
    #: Whether each table also has a Delta log; by default as `delta` of [lake] says.
    delta: bool | None = None
    #: The tables' name in the lake, `table` or `schema.table`, with {schema} and {table} for the source's; by default the source's.
    name: str = ""

    @model_validator(mode="after")
    def _is_rule(self) -> Self:
        _ = self.rule
        return self

    @property
    def rule(self) -> LayoutRule:
        """The section as the lake takes it."""
        pattern = Pattern.parse(self.pattern)
        if pattern.excludes:
            raise ValueError(f"{self.pattern!r}: a pattern here must not begin with '!'")
        layout = TableLayout.parse(self.partition, self.sort, self.options)
        if self.mode not in MODES:
            known = ", ".join(f'"{mode}"' for mode in MODES)
            raise ValueError(f'mode = "{self.mode}" is none of {known}')
        if self.rows and (self.mode != CURRENT or self.feed):
            # What a filter keeps out of the table must not be in its feed.
            other = "feed" if self.feed else f'mode = "{self.mode}"'
            raise ValueError(f"rows cannot be combined with {other}")
        return LayoutRule(
            pattern,
            layout,
            self.source,
            parse_masks(self.mask),
            self.mode,
            parse_feed(self.feed),
            self.rows.strip(),
            self.delta,
            parse_name(self.name, pattern),
        )


class LakeViewSection(_Section):
    """`[[lake.view]]`: a view that is kept at every epoch, in PostgreSQL's SQL."""

    #: `name` or `schema.name`; without a schema it is in `views`.
    name: str
    #: One SELECT over tables of the lake.
    sql: str | None = None
    #: A file with it instead, relative to the configuration's.
    file: Path | None = None
    #: Seconds that its queries may take in an epoch: the tables wait meanwhile.
    timeout: float = Field(default=600.0, gt=0)
    #: Rows that it may have.
    max_rows: int = Field(default=100_000_000, gt=0)

    @model_validator(mode="after")
    def _has_sql(self) -> Self:
        parts = self.name.split(".")
        if len(parts) > 2 or not all(_VIEW_NAME.fullmatch(part) for part in parts):
            raise ValueError(
                f"{self.name!r:.80} is not a name of a view: use name or schema.name, of lower-case letters, digits and underscores"
            )
        if (self.sql is None) == (self.file is None):
            raise ValueError(f"view {self.name}: specify either sql or file")
        return self

    @property
    def full_name(self) -> str:
        """`schema.name`."""
        return self.name if "." in self.name else f"views.{self.name}"


class CatalogSection(_Section):
    """`[lake.catalog]`: where the metadata of the lake's tables is.

    In the lake's own folder, or in an Iceberg REST catalog, whose secrets come from the environment (`TUSKLINE_CATALOG_TOKEN`, or
    `TUSKLINE_CATALOG_CREDENTIAL` as `id:secret` for OAuth 2) or from a token's file.
    """

    type: Literal["folder", "rest"] = "folder"
    #: The catalog's address, up to `/v1`.
    uri: str = ""
    warehouse: str = ""
    #: The namespace that those of the tables are in, `stream.schema`; its levels separated by dots. Each lake has its own.
    namespace: str = Field(default="tuskline", pattern=r"^[^.]+(\.[^.]+)*$")
    #: Where OAuth 2 tokens come from, if not from the catalog itself.
    oauth2_uri: str = ""
    scope: str = "catalog"
    #: A file with a bearer token, which nobody else may read; it is read again when the token is refused.
    token_file: Path | None = None
    #: The certificate authority of the catalog's server.
    ca: Path | None = None
    #: Whether the addresses may be http://.
    allow_http: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.type == "rest" and not self.uri:
            raise ValueError("a catalog of type rest needs uri, its address up to /v1")
        # Not `model_fields_set`: with flags, the whole section is given again.
        if self.type == "folder" and self != CatalogSection.model_construct():
            raise ValueError('these settings require a catalog of type rest: set type = "rest"')
        for address in filter(None, (self.uri, self.oauth2_uri)):
            if "@" in urlsplit(address).netloc:
                raise ValueError(
                    "specify the address without a user: secrets are in the environment"
                )
        return self


class MaintenanceSection(_Section):
    """`[lake.maintenance]`: how data files are rewritten beside the epochs."""

    #: Whether `tuskline up` starts a maintainer on the lake's machine.
    enabled: bool = True
    #: Seconds between two looks at the tables that have changed.
    interval: float = Field(default=30.0, gt=0)
    #: The approximate size of a rewritten data file.
    file_bytes: int = Field(default=128 << 20, ge=1 << 20)
    #: The most bytes of data files that one plan reads; a plan ends before the next one is made.
    plan_bytes: int = Field(default=1 << 30, ge=1 << 20)
    #: Seconds after which a table that has not changed is rewritten for fewer removed rows: a hundredth of a data file's instead of a tenth.
    settled: float = Field(default=900.0, ge=0)


class LakeSection(_Section):
    """`[lake]`: where the tables are published, and how often."""

    uri: str
    #: How the bucket of a lake at s3://bucket/prefix is reached; by default as AWS_ENDPOINT_URL and AWS_REGION say. Its keys come
    #: from the environment only.
    endpoint: str | None = None
    region: str | None = None
    #: Whether the endpoint may be http://.
    allow_http: bool = False
    format: Literal["iceberg"] = "iceberg"
    #: Whether each table also has a Delta log over the same data files, unless a section of [[lake.tables]] says otherwise.
    delta: bool = False
    catalog: CatalogSection = CatalogSection()
    #: Seconds between epochs when there is data.
    epoch_interval: float = Field(default=60.0, gt=0)
    #: Seconds that an epoch stays readable after a newer one was published.
    retention: float = Field(default=86_400.0, gt=0)
    #: Whether epochs wait for a table that cannot be updated: always, during a full resync, or never.
    failing_table: Literal["hold", "wait_for_copy", "go_on"] = "wait_for_copy"
    #: Bytes per second at most: of rows, before compression, that an initial copy processes; of a table, as PostgreSQL
    #: stores it, that a comparison (`reattach`, `verify`) reads. Unlimited by default.
    copy_rate: float | None = Field(default=None, gt=0)
    #: The size in bytes of the chunks in which a large table is copied; an interrupted copy does not read complete ones again.
    copy_chunk_bytes: int = Field(default=4 << 30, ge=1 << 20)
    #: The handling of rows with an unrepresentable value, by `stream.schema.table`, or `default` for
    #: all others: `fail` (the table stops and reports the row) or `quarantine` (the row is quarantined).
    on_unrepresentable_value: dict[str, Literal["fail", "quarantine"]] = {}
    #: How rows are removed from a table, by `stream.schema.table`, or `default` for all others: by deletion vectors, or, for
    #: engines that do not apply vectors, by position deletes or by writing data files again.
    deletes: dict[str, Literal["vectors", "position-deletes", "copy-on-write"]] = {}
    #: How the rows of tables are laid out, and which columns are masked: the first section whose pattern matches a table.
    tables: tuple[LakeTablesSection, ...] = ()
    #: A file with the key by which columns are hashed, which nobody else may read; by default TUSKLINE_MASK_KEY has the key.
    mask_key_file: Path | None = None
    #: Spark's master for `tuskline lake run`; by default what Spark's own settings say, or else local[2]. Under spark-submit its
    #: master wins.
    spark_master: str | None = None
    maintenance: MaintenanceSection = MaintenanceSection()
    #: Views that are kept at every epoch.
    view: tuple[LakeViewSection, ...] = ()

    @property
    def has_delta(self) -> bool:
        """Whether tables have Delta logs."""
        return self.delta or any(section.delta for section in self.tables)

    @model_validator(mode="after")
    def _has_each_view_once(self) -> Self:
        if twice := first_repeated(tuple(view.full_name for view in self.view)):
            raise ValueError(f"view {twice} is configured twice")
        return self

    @model_validator(mode="after")
    def _has_each_name_once(self) -> Self:
        """As far as the configuration alone tells: of sections that name one table each."""
        views = {view.full_name for view in self.view}
        named: list[tuple[str | None, str, str]] = []
        for section in self.tables:
            rule = section.rule
            if not rule.name or rule.pattern.exact is None:
                continue
            own = relation_name(*rule.pattern.exact)
            name = target_name(rule.name, f"any.{own}").removeprefix("any.")
            if name in views:
                raise ValueError(f"name: {own} and a view would both be {name} in the lake")
            for source, other, its in named:
                is_one = source is None or section.source is None or source == section.source
                if is_one and its == name and other != own:
                    raise ValueError(f"name: {other} and {own} would both be {name} in the lake")
            named.append((section.source, own, name))
        return self


class SafekeepersSection(_Section):
    """`[safekeepers]`: WAL is on a quorum of safekeepers before COMMIT returns.

    `log-server run` hosts `local` of them, `bridge run` the proposer that reaches all of `addresses`. Of the hosted
    ones, the first listens where `listen` and `wal_listen` say, each further one a port higher.
    """

    #: The addresses of the safekeepers; by default the `local` ones.
    addresses: tuple[HostPort, ...] = ()
    #: The number of safekeepers hosted by this machine.
    local: Literal[0, 1, 3, 5] = 0
    #: Where it keeps them; by default the data_dir of its first log server.
    data_dir: Path | None = None
    #: The source whose server's WAL is stored, with all its databases; by default the first source.
    source: StreamName | None = None
    #: The proposer's name as the server's synchronous standby.
    application_name: StandbyName = "tuskline_quorum"
    #: The physical slot, idle, that keeps WAL for safekeepers that lag.
    slot: SlotName = "tuskline_safekeepers"
    #: Bytes of WAL in the proposer's memory, at most.
    max_queue_bytes: int = Field(default=64 << 20, ge=32 << 20)
    #: Bytes that a safekeeper may be behind before its WAL is removed, and it is rebuilt.
    max_laggard_bytes: int = Field(default=16 << 30, ge=64 << 20)
    #: Where hosted safekeepers listen for the proposer.
    listen: HostPort = "127.0.0.1:7410"
    #: Where hosted safekeepers serve WAL to PostgreSQL's own clients.
    wal_listen: HostPort = "127.0.0.1:7420"
    #: File of the users who may read WAL, with lines `"name" "SCRAM-SHA-256$..."`; by default there are none.
    users: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    #: The CA that must have issued the certificates of readers.
    tls_client_ca: Path | None = None
    #: The greatest disk usage of one hosted safekeeper's WAL, in bytes; unlimited by default.
    wal_bytes: Annotated[int, Field(ge=64 << 20)] | None = None
    #: Bytes to keep free on that file system.
    free_bytes: Bytes = 64 << 20
    #: Bytes of WAL to keep before its end even if no reader needs them.
    keep_bytes: Bytes = 0
    #: The most WAL that slots and the archive retain, in bytes: a slot further behind is lost, and `status` names what the
    #: archive lacks. -1: no limit; a reader that never returns, or an archive that is down, then fills the disk.
    max_slot_wal_keep_size: int = Field(default=16 << 30, ge=-1)
    #: Where complete segments are copied: any URL that fsspec knows. Old WAL waits for it.
    archive: str | None = None

    @field_validator("listen", "wal_listen")
    @classmethod
    def _has_room(cls, address: str) -> str:
        if not 1 <= split_address(address)[1] <= 65_530:
            raise ValueError("the port must be between 1 and 65530")
        return address

    @field_validator("addresses")
    @classmethod
    def _each_once(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        if twice := first_repeated(addresses):
            raise ValueError(f"{twice} is listed twice, and would count twice")
        if len(addresses) == 2:
            raise ValueError("two safekeepers are worse than one: either one's loss stops commits")
        return addresses

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        taken = [*self.hosted_addresses, *self.wal_addresses]
        if len(set(taken)) < len(taken):
            raise ValueError(
                f"listen and wal_listen need {self.local} ports each, and they overlap"
            )
        return self

    def _row(self, first: str) -> tuple[str, ...]:
        host, _, port = first.rpartition(":")
        return tuple(f"{host}:{int(port) + n}" for n in range(self.local))

    @property
    def hosted_addresses(self) -> tuple[str, ...]:
        """Where each hosted safekeeper hears the proposer."""
        return self._row(self.listen)

    @property
    def wal_addresses(self) -> tuple[str, ...]:
        """Where each hosted safekeeper serves WAL."""
        return self._row(self.wal_listen)

    @property
    def most_kept_for_slots(self) -> int | None:
        """`max_slot_wal_keep_size`; None: no limit."""
        return None if self.max_slot_wal_keep_size < 0 else self.max_slot_wal_keep_size

    @property
    def is_alone(self) -> bool:
        """Whether a proposer here would find a single safekeeper although `addresses` does not say so."""
        return self.local == 1 and not self.addresses

    @property
    def proposed_to(self) -> tuple[str, ...]:
        """The safekeepers that the proposer reaches."""
        return self.addresses or self.hosted_addresses


class CandidateSection(_Section):
    """`[slots.candidates.NAME]`: a standby that may be promoted, and keeps copies of the primary's slots."""

    #: A database of the standby, with the extension; copies in other databases are managed from there.
    dsn: str
    #: The physical slot on the primary that the standby streams from: its `primary_slot_name`.
    slot: SlotName


class SlotsSection(_Section):
    """`[slots]`: the logical slots of which every failover candidate keeps a copy; all of them by default.

    A slot is chosen if any of the four lists matches it; without any lists, all slots are.
    """

    #: At least one standby, under a name chosen here.
    candidates: dict[StreamName, CandidateSection] = Field(min_length=1)
    #: A database of the primary with the extension; by default the source's.
    dsn: str | None = None
    #: The source whose server is the primary; by default the first source.
    source: StreamName | None = None
    names: tuple[str, ...] = ()
    #: Shell patterns: `*`, `?`, `[abc]`.
    patterns: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    databases: tuple[str, ...] = ()
    #: Seconds between two polls of a standby.
    poll: float = Field(default=1.0, ge=0.05, le=60)
    #: Seconds for which a proof remains valid while the primary does not answer.
    max_age: float = Field(default=30.0, gt=0)
    #: Whether `SYNCED`, PostgreSQL's own statement about its copies, counts as ready (17 and later, without the extension).
    accept_native: bool = False

    @model_validator(mode="after")
    def _slot_each(self) -> Self:
        slots = [candidate.slot for candidate in self.candidates.values()]
        if len(set(slots)) < len(slots):
            raise ValueError("each standby streams from a physical slot of its own")
        return self


class TlsSection(_Section):
    """`[tls]`: the certificate with which this machine's services and clients of the change log prove who they are."""

    #: The authority's certificate: who is to be trusted.
    ca: Path
    #: This machine's own certificate, and the key to it.
    certificate: Path
    key: Path


class MetricsSection(_Section):
    """`[metrics]`: where `tuskline up` serves `/metrics`, `/healthz` and `/readyz`."""

    listen: HostPort = "127.0.0.1:9400"
    #: A file with the token of scrapers that run as another account of this machine; without it there are none.
    token_file: Path | None = None


class LogsSection(_Section):
    """`[logs]`: how the parts write their logs, to standard error."""

    format: Literal["console", "json"] = "console"
