"""The configuration: a TOML file < `TUSKLINE_*` in the environment < flags (`tuskline --set KEY=VALUE`).

Sections and keys are strict: an unknown one is an error that suggests the nearest, so that a file written for a
newer version is never applied in part. Relative paths are relative to the file's folder.
"""

import difflib
import json
import os
import tomllib
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from walsender_bridge.config.etcd import check_etcd
from walsender_bridge.config.machine import check_machine, parts_here
from walsender_bridge.config.places import check_places
from walsender_bridge.config.sections import (
    CandidateSection,
    CatalogSection,
    EtcdSection,
    GateSection,
    LakeSection,
    LakeTablesSection,
    LogSection,
    LogServerSection,
    LogsSection,
    MachineSection,
    MetricsSection,
    Part,
    SafekeepersSection,
    SlotsSection,
    SourceSection,
    TlsSection,
)
from walsender_bridge.errors import ConfigError, UsageError
from walsender_bridge.postgres.protocol.relation_name import relation_name, split_relation
from walsender_bridge.postgres.table_patterns import Choice
from walsender_bridge.runtime import listening, shared_files
from walsender_bridge.runtime.tls_files import TlsFiles, with_files

__all__ = [
    "Config",
    "EtcdSection",
    "GateSection",
    "LakeSection",
    "LogSection",
    "LogServerSection",
    "LogsSection",
    "MachineSection",
    "MetricsSection",
    "Part",
    "SafekeepersSection",
    "SlotsSection",
    "SourceSection",
    "TlsSection",
    "has_password",
    "load_config",
    "remember_flags",
]

_PREFIX = "TUSKLINE_"
#: The values of `--set`, as a JSON object in the environment, where child processes see them, too.
FLAGS_VARIABLE = "TUSKLINE_FLAGS"


class HostedLogServer(NamedTuple):
    """A log server of this machine."""

    listen: str
    data_dir: Path


class Config(BaseModel):
    """The whole configuration. Load it with `load_config`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: None: all that is described runs on this machine.
    machine: MachineSection | None = None
    log: LogSection = LogSection()
    source: tuple[SourceSection, ...] = ()
    log_server: tuple[LogServerSection, ...] = ()
    lake: LakeSection | None = None
    safekeepers: SafekeepersSection = SafekeepersSection()
    #: None disables slot copies.
    slots: SlotsSection | None = None
    gate: GateSection = GateSection()
    #: None disables the metrics endpoint.
    metrics: MetricsSection | None = None
    logs: LogsSection = LogsSection()
    #: None: the change log's services are for this machine alone.
    tls: TlsSection | None = None
    #: The cluster for `[log] store = "etcd"`.
    etcd: EtcdSection | None = None

    @property
    def parts(self) -> frozenset[Part]:
        """The parts that run on this machine."""
        return parts_here(self)

    @property
    def data_dir(self) -> Path:
        """Where the parts of this machine keep their state."""
        found = self.log.data_dir if self.machine is None else self.machine.data_dir
        assert found is not None, "load_config has checked it"
        return found

    @property
    def repository_dir(self) -> Path:
        """Where the repository is kept. Raises `ConfigError` if it is on another machine."""
        if self.log.data_dir is None:
            raise ConfigError(
                "the log's repository is on another machine",
                where=self.log.listen,
                repair="run the command there",
            )
        return self.log.data_dir

    @property
    def safekeepers_dir(self) -> Path:
        """Where the safekeepers of this machine are kept."""
        logs = (each.data_dir for each in self.log_server if each.data_dir is not None)
        found = self.safekeepers.data_dir or next(logs, None)
        assert found is not None, "load_config has checked it"
        return found

    @property
    def asks_log(self) -> bool:
        """Whether a part of this machine needs the log, so that its state matters here."""
        return not self.parts.isdisjoint({"repository", "bridge", "lake"})

    @property
    def tls_files(self) -> TlsFiles | None:
        """The files of `[tls]`."""
        its = self.tls
        return None if its is None else TlsFiles(its.ca, its.certificate, its.key)

    @property
    def log_address(self) -> str:
        """The repository's Flight address, or those of all repositories, with the paths of `[tls]`."""
        return with_files(",".join(self.repository_listens), self.tls_files)

    @property
    def names_repository(self) -> bool:
        """Whether `log_address` is one that the file names, or the default of parts that need it."""
        return self.asks_log or not self.log.model_fields_set.isdisjoint({"listen", "repositories"})

    @property
    def repository_listens(self) -> tuple[str, ...]:
        """Where all repositories listen, `host:port`."""
        return self.log.repositories or (self.log.listen,)

    @property
    def hosted_log_servers(self) -> tuple[HostedLogServer, ...]:
        """The log servers of this machine."""
        return tuple(
            HostedLogServer(section.listen, section.data_dir)
            for section in self.log_server
            if section.data_dir is not None
        )

    @property
    def replicas(self) -> int:
        """The number of log servers that each stream is written to."""
        return self.log.replicas or min(3, len(self.log_server))

    @property
    def min_replicas(self) -> int:
        """The number of them that must be in sync."""
        return self.log.min_replicas or max(1, self.replicas - 1)

    @property
    def quorum_source(self) -> SourceSection | None:
        """A database of the server whose commits wait for the safekeepers; None without safekeepers, or if the bridge is elsewhere."""
        section = self.safekeepers
        if not section.proposed_to or "bridge" not in self.parts:
            return None
        return next(s for s in self.source if section.source in {None, s.name})

    def gate_of(self, source: SourceSection) -> GateSection:
        """The gate that applies to this source.

        The safekeepers count for the sources of their server, which is identified by its host.
        """
        gate, quorum = source.gate or self.gate, self.quorum_source
        same = quorum is not None and same_hosts(quorum.dsn, source.dsn)
        return gate.model_copy(update={"safekeepers": gate.safekeepers and same})

    def gate_record(self, source: SourceSection) -> Path:
        """The file of a source's gate decisions (`capture.gate.record`)."""
        return self.data_dir / "gate" / f"{source.name}.jsonl"

    def capture_status(self, source: SourceSection) -> Path:
        """The status file of a source's capture, where its bridge runs (`capture.status_record`)."""
        return self.run_dir / f"capture-{source.name}.status.json"

    @property
    def capture_statuses(self) -> list[Path]:
        """The status files that there are, also of captures of sources that were configured before."""
        return sorted(self.run_dir.glob("capture-*.status.json"))

    @property
    def slots_dsn(self) -> str:
        """A database of the primary whose slots are copied to the failover candidates."""
        section = self.slots
        if section is not None and section.dsn is not None:
            return section.dsn
        wanted = section.source if section is not None else None
        return next(s.dsn for s in self.source if wanted in {None, s.name})

    @property
    def slots_dir(self) -> Path:
        """Where the record of copies is, a file for each failover candidate (`slot_sync.record_file`)."""
        return self.data_dir / "slots"

    @property
    def slots_status(self) -> Path:
        """The status file of the controller of slot copies, where it runs."""
        return self.run_dir / "slots.json"

    @property
    def spool_dir(self) -> Path:
        """Where captures keep large transactions until they commit, a folder for each source."""
        return self.data_dir / "spool"

    @property
    def scratch_dir(self) -> Path:
        """Where Spark drivers that are started here keep what ends with them (`spark_consumers.spark.scratch`)."""
        return self.data_dir / "scratch"

    @property
    def proposer_status(self) -> Path:
        """The status file of the proposer, where its bridge runs (`proposer.status_record`)."""
        return shared_files.folder(self.run_dir) / "proposer.json"

    @property
    def commit_page(self) -> Path:
        """The page in which the proposer publishes the quorum's LSN for the commit gates (`runtime.commit_page`)."""
        return shared_files.folder(self.run_dir) / "commit.page"

    @property
    def members_request(self) -> Path:
        """The file in which another membership of the safekeepers is asked for (`proposer.member_changes`)."""
        return self.data_dir / "members.json"

    @property
    def quorum_id_file(self) -> Path:
        """Where the bridge records its quorum's id (`proposer.quorum_id_record`)."""
        return self.data_dir / "quorum-id.json"

    @property
    def run_dir(self) -> Path:
        """The folder of the supervisors' state files (see `supervisor`)."""
        return self.data_dir / "run"


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    model: Any = Config
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        model = {
            "machine": MachineSection,
            "log": LogSection,
            "source": SourceSection,
            "log_server": LogServerSection,
            "lake": LakeSection,
            "tables": LakeTablesSection,
            "catalog": CatalogSection,
            "safekeepers": SafekeepersSection,
            "slots": SlotsSection,
            "candidates": CandidateSection,
            "gate": GateSection,
            "metrics": MetricsSection,
            "logs": LogsSection,
            "tls": TlsSection,
            "etcd": EtcdSection,
        }.get(part, model)
    return [*model.model_fields]


def _explain(error: ValidationError, where: str) -> ConfigError:
    found = error.errors(include_url=False, include_input=False)
    # A misspelt key is also a missing one; report the misspelling.
    first = next((e for e in found if e["type"] == "extra_forbidden"), found[0])
    key = ".".join(str(part) for part in first["loc"] if part != "[key]")
    if first["type"] == "extra_forbidden":
        repair = _nearest(str(first["loc"][-1]), _fields_at(first["loc"]))
        return ConfigError(f"unknown key {key!r}", where=where, repair=repair or "remove it")
    if first["type"] == "missing":
        return ConfigError(f"{key!r} is missing", where=where, repair=f"add {key}")
    what = first["msg"].removeprefix("Value error, ")
    return ConfigError(f"{key}: {what[:1].lower()}{what[1:]}", where=where, repair=f"correct {key}")


def _check_tables(config: Config, where: str) -> None:
    """Raise `ConfigError` for a table in `[lake.on_unrepresentable_value]` or `[lake.deletes]` that no source can have."""
    if config.lake is None:
        return
    streams = [source.name for source in config.source]
    choices = {source.name: Choice.of(source.tables) for source in config.source}
    named = [(s, names) for s, choice in choices.items() for names in choice.named]
    known = ["default", *(f"{stream}.{relation_name(*names)}" for stream, names in named)]
    for section in config.lake.tables:
        if section.source is not None and section.source not in streams:
            raise ConfigError(
                f"lake.tables: there is no source {section.source!r}",
                where=where,
                repair=_nearest(section.source, streams) or "one of: " + ", ".join(streams),
            )
    settings = {key: getattr(config.lake, key) for key in ("on_unrepresentable_value", "deletes")}
    for key, name in [(key, name) for key, tables in settings.items() for name in tables]:
        stream, _, rest = name.partition(".")
        if name == "default" or (
            stream in streams and "." in rest and choices[stream].means(*split_relation(rest))
        ):
            continue
        near = _nearest(name, known) or _nearest(name, [f"{s}.{name}" for s in streams])
        raise ConfigError(
            f"lake.{key}: {name!r} is not a table of a source",
            where=where,
            repair=near or "write 'default', or \"stream.schema.table\" in quotes",
        )


def _check_safekeepers(config: Config, where: str) -> None:
    """Raise `ConfigError` for safekeepers of no source, or whose ports another part has."""
    section = config.safekeepers
    names = [source.name for source in config.source]
    if section.source is not None and section.source not in names and "bridge" in config.parts:
        raise ConfigError(
            f"safekeepers.source: there is no source {section.source!r}",
            where=where,
            repair=_nearest(section.source, names) or "one of: " + ", ".join(names),
        )
    taken = {config.log.listen, *(log_server.listen for log_server in config.log_server)}
    taken |= {config.metrics.listen} if config.metrics is not None else set()
    for address in (*section.hosted_addresses, *section.wal_addresses):
        if address in taken:
            raise ConfigError(
                f"safekeepers: {address} is the address of another part, too",
                where=where,
                repair=f"choose another listen or wal_listen: each takes {section.local} ports in a row",
            )


def _check_log_servers(config: Config, where: str) -> None:
    """Raise `ConfigError` for more replicas than log servers, where the repository chooses them."""
    if "repository" not in config.parts:
        return
    if config.replicas > len(config.log_server):
        raise ConfigError(
            f"log.replicas: {config.replicas} replicas need as many log servers, and there are"
            f" {len(config.log_server)}",
            where=where,
            repair="add a [[log_server]] for each, or choose fewer replicas",
        )
    if config.min_replicas > config.replicas:
        raise ConfigError(
            f"log.min_replicas is {config.min_replicas}, but a stream has {config.replicas} replicas",
            where=where,
            repair="choose a min_replicas of at most log.replicas",
        )


def _check_slots(config: Config, where: str) -> None:
    """Raise `ConfigError` for slots of no source."""
    names = [source.name for source in config.source]
    if config.slots is None or config.slots.source in {None, *names}:
        return
    raise ConfigError(
        f"slots.source: there is no source {config.slots.source!r}",
        where=where,
        repair=_nearest(config.slots.source or "", names) or "one of: " + ", ".join(names),
    )


def _check_gates(config: Config, where: str) -> None:
    """Raise `ConfigError` for a candidate that is none."""
    gates = {f"source.{s.name}.gate": s.gate for s in config.source if s.gate is not None}
    for name, gate in {"gate": config.gate, **gates}.items():
        if config.safekeepers.proposed_to and config.safekeepers.slot in gate.names:
            raise ConfigError(
                f"{name}: {config.safekeepers.slot!r} is the safekeepers' own slot",
                where=where,
                repair="leave it out: what the safekeepers have is waited for anyway",
            )


def _check_strangers(config: Config, where: str) -> None:
    """Raise `ConfigError` for a port of ours that other machines could reach without TLS."""
    listens = {"log.listen": config.log.listen}
    listens |= {f"log_server.{n}.listen": each.listen for n, each in enumerate(config.log_server)}
    if config.safekeepers.local:
        listens["safekeepers.listen"] = config.safekeepers.listen
    if config.metrics is not None:
        listens["metrics.listen"] = config.metrics.listen
    for name, address in listens.items():
        try:
            listening.check_strangers(address, tls=config.tls is not None, resolve=False)
        except ConfigError as error:
            raise ConfigError(
                f"{name}: {error.what}", where=f"{where}, {address}", repair=error.repair
            ) from None


def _resolve(base: Path, values: dict[str, Any]) -> None:
    owners = (values.get("machine"), values.get("log"), values.get("safekeepers"))
    for section in (*owners, *_tables(values.get("log_server"))):
        if isinstance(section, dict) and isinstance(section.get("data_dir"), str):
            section["data_dir"] = str(base / section["data_dir"])
    safekeepers = values.get("safekeepers")
    if isinstance(safekeepers, dict):
        for name in ("users", "tls_cert", "tls_key", "tls_client_ca", "archive"):
            if isinstance(safekeepers.get(name), str) and "://" not in safekeepers[name]:
                safekeepers[name] = str(base / safekeepers[name])
    for section in (values.get("tls"), values.get("etcd"), values.get("metrics")):
        if isinstance(section, dict):
            for name in (*TlsSection.model_fields, "token_file"):
                if isinstance(section.get(name), str):
                    section[name] = str(base / section[name])
    lake = values.get("lake")
    if isinstance(lake, dict) and isinstance(lake.get("uri"), str) and "://" not in lake["uri"]:
        lake["uri"] = str(base / lake["uri"])
    for view in _tables(lake.get("view")) if isinstance(lake, dict) else ():
        if isinstance(view, dict) and isinstance(view.get("file"), str):
            view["file"] = str(base / view["file"])
    if isinstance(lake, dict) and isinstance(lake.get("mask_key_file"), str):
        lake["mask_key_file"] = str(base / lake["mask_key_file"])
    catalog = lake.get("catalog") if isinstance(lake, dict) else None
    if isinstance(catalog, dict):
        for name in ("token_file", "ca"):
            if isinstance(catalog.get(name), str):
                catalog[name] = str(base / catalog[name])


def _tables(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def remember_flags(assignments: list[str]) -> None:
    """Take `KEY=VALUE` flags for `load_config` here and in every process that is started from here.

    KEY is `section.key`, or `source.NAME.key`; VALUE is TOML, or plain text. Raises `UsageError`, also for a
    password: arguments are everybody's to read.
    """
    flags: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise UsageError(
                "--set needs KEY=VALUE", repair="for example --set lake.epoch_interval=5"
            )
        if key.endswith("dsn") and has_password(text):
            raise UsageError(
                f"--set {key}: a password in an argument can be read by every user of this machine",
                repair="put it into ~/.pgpass, PGPASSWORD or a service file",
            )
        try:
            flags[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            flags[key.strip()] = text
    if flags:
        os.environ[FLAGS_VARIABLE] = json.dumps(flags)


def same_hosts(dsn: str, other: str) -> bool:
    """Whether two libpq connection strings name the same hosts and ports."""
    from psycopg import Error
    from psycopg.conninfo import conninfo_to_dict

    try:
        places = [conninfo_to_dict(each) for each in (dsn, other)]
    except Error:
        return dsn == other
    return (
        len({tuple(p.get(k) for k in ("host", "hostaddr", "port", "service")) for p in places}) == 1
    )


def has_password(dsn: str) -> bool:
    """Whether a libpq connection string holds a password; also if it is one that libpq does not read."""
    from psycopg import Error
    from psycopg.conninfo import conninfo_to_dict

    try:
        return "password" in conninfo_to_dict(dsn)
    except Error:
        return "password" in dsn.lower()


def _with_environment(values: dict[str, Any]) -> Config:
    """The file's values, with those of `TUSKLINE_*`. Raises pydantic's `ValidationError`."""
    names = tuple(f"{_PREFIX}{name}".upper() for name in Config.model_fields)
    if not any(name.upper().startswith(names) for name in os.environ):
        return Config(**values)
    # Its library takes longer to import than the file takes to read.
    from walsender_bridge.config.environment import FromEnvironment

    return FromEnvironment(**values)


#: The hint about a KEY of `--set` that leads nowhere.
_SET: Final = (
    "write section.key, such as lake.epoch_interval; in a list source.NAME.key, or log_server.0.key"
)


def _with_flags(config: Config, where: str) -> Config:
    flags = json.loads(os.environ.get(FLAGS_VARIABLE, "{}"))
    if not flags:
        return config
    values = config.model_dump()
    for key, value in flags.items():
        _assign(values, key, value)
    try:
        return Config(**values)
    except ValidationError as error:
        raise _explain(error, f"{where} with --set") from None


def _assign(values: dict[str, Any], key: str, value: object) -> None:
    *path, last = key.split(".")
    place: Any = values
    for part in path:
        if isinstance(place, (list, tuple)):
            names = {str(n): each for n, each in enumerate(place)}
            names |= {each["name"]: each for each in place if "name" in each}
            found = names.get(part)
        else:
            found = place.setdefault(part, {}) or {}
            place[part] = found
        if not isinstance(found, (dict, list, tuple)):
            raise UsageError(f"--set {key}: there is no {part!r}", repair=_SET)
        place = found
    if not isinstance(place, dict):
        raise UsageError(f"--set {key}: {'.'.join(path)} is a list", repair=_SET)
    place[last] = value


def load_config(path: Path) -> Config:
    """The configuration in a TOML file, completed from the environment and from flags.

    Raises `ConfigError` (unreadable, not TOML, an unknown or missing key, a wrong value) and
    `NotSupportedError` (what this version does not have).
    """
    where = str(path)
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"could not read the configuration: {error.strerror}",
            where=where,
            repair="name the file with --config",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not TOML: {error}", where=where, repair="correct that line") from None
    _resolve(path.resolve().parent, values)
    try:
        config = _with_environment(values)
    except ValidationError as error:
        raise _explain(error, where) from None
    config = _with_flags(config, where)
    check_machine(config, where)
    _check_tables(config, where)
    _check_log_servers(config, where)
    check_etcd(config, where)
    _check_safekeepers(config, where)
    _check_slots(config, where)
    _check_gates(config, where)
    check_places(config, where)
    _check_strangers(config, where)
    names = [source.name for source in config.source]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"two sources are called {name!r}", where=where, repair="give each its own name"
            )
    return config
