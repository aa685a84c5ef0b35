"""`tuskline doctor`: runs all checks on all sources and on this machine. The exit code is the first error's cause."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from walsender_bridge.cli.options import (
    DEFAULT_CONFIG,
    Admin,
    AsJson,
    ConfigPath,
    OneSource,
    checked_admin,
    chosen_sources,
    load_config,
)
from walsender_bridge.doctor.finding import Finding, Severity, counted
from walsender_bridge.errors import Cause, TusklineError
from walsender_bridge.provisioning.configured import capture_source, known_of, needed_quorum
from walsender_bridge.runtime.output import Output

if TYPE_CHECKING:
    from walsender_bridge.capture.stream_record import KnownPosition
    from walsender_bridge.config import Config, LakeSection, SourceSection


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("doctor")(doctor)


def doctor(
    config: ConfigPath = DEFAULT_CONFIG,
    source: OneSource = None,
    admin: Admin = None,
    fix_sql: Annotated[
        bool,
        typer.Option(
            "--fix-sql", help="Print the SQL that repairs the findings, for psql; execute nothing."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check servers and configuration; report what is not ready.

    Each finding comes with the SQL or the command that repairs it. With --admin, this works before the role of a DSN exists.
    """
    from walsender_bridge.doctor import parts as doctor_parts
    from walsender_bridge.doctor.lake_catalog import of_catalog
    from walsender_bridge.observability import bridge_view

    settings = load_config(config)
    admin = checked_admin(admin)
    # The lake copies tables from the servers, too.
    asked = not settings.parts.isdisjoint({"bridge", "lake"})
    sections = chosen_sources(settings, source) if asked else []
    by_source = {
        section.name: of_source(section, admin, partial(known_of, settings, section))
        for section in sections
    }
    for section in sections if "bridge" in settings.parts else ():
        by_source[section.name] += of_gate(settings, section, admin)
        by_source[section.name] += of_capture(settings, section, by_source[section.name])
        by_source[section.name] += doctor_parts.of_former_sources(settings, section)
    now = bridge_view.without_standby(settings, bridge_view.observe(settings))
    if now.quorum_source is not None and now.quorum_source.name in by_source:
        by_source[now.quorum_source.name] += of_quorum(now, admin=admin)
    parts = [(f"source {s.name}", s.dsn, by_source[s.name]) for s in sections]
    if (
        settings.slots is not None
        and "slots" in settings.parts
        and source in {None, settings.slots.source}
    ):
        parts.append(("copies of slots", settings.slots_dsn, of_slots(settings)))
    findings = [each for _, _, found in parts for each in found]
    findings += [*of_log(settings), *of_machine(settings)]
    findings += [*doctor_parts.of_ports(settings), *doctor_parts.of_processes(settings)]
    findings += [*doctor_parts.of_certificate(settings), *doctor_parts.of_hosts(settings)]
    findings += [*of_etcd(settings), *of_catalog(settings)]
    # The error with which a job ended and the check of its folder may be the same finding.
    findings = [*dict.fromkeys(findings)]
    output = Output(as_json=as_json)
    if as_json:
        record = {
            "errors": _count(findings, Severity.ERROR),
            "warnings": _count(findings, Severity.WARNING),
            "findings": [each.to_json() for each in findings],
        }
        output.record({**record, "fix_sql": _script(parts)} if fix_sql else record)
    elif fix_sql:
        output.text(_script(parts))
    else:
        _print(output, findings)
    first = next((each for each in findings if each.severity is Severity.ERROR), None)
    if first is not None:
        raise typer.Exit(int(first.cause))


def of_source(
    section: "SourceSection",
    admin: str | None = None,
    known: "Callable[[], KnownPosition | None]" = lambda: None,
) -> list[Finding]:
    """The findings about one source and its server. `known` returns the position of its stream."""
    from walsender_bridge.doctor.server import examine

    return examine(capture_source(section), admin, known)


def of_gate(
    settings: "Config", section: "SourceSection", admin: str | None = None
) -> list[Finding]:
    """The findings about the candidates of the source's commit gate, if it has any."""
    gate = settings.gate_of(section)
    if not gate.names:
        return []
    from walsender_bridge.capture.gate.core import Rule
    from walsender_bridge.doctor.server import examine_gate

    rule = Rule(gate.names, bool(gate.members), on_missing=gate.on_missing)
    return examine_gate(capture_source(section), rule, admin)


def of_capture(
    settings: "Config", section: "SourceSection", others: Sequence[Finding] = ()
) -> list[Finding]:
    """The error with which its capture stopped here for good, unless it is among `others`."""
    from walsender_bridge.capture.status_record import CaptureStatus
    from walsender_bridge.runtime import status_file

    status = status_file.read(settings.capture_status(section), CaptureStatus)
    if status is None or status.error is None or status.state != "stopped":
        return []
    found = status.error.error()
    # Only what the server sent again during the overlap shows this divergence; a query now would not.
    sent = found.cause is Cause.DIVERGED and status.received_lsn
    if sent and any(each.cause is Cause.DIVERGED for each in others):
        return []
    if not sent and found.cause is not Cause.UNSUPPORTED_VALUE:
        return []
    from walsender_bridge.doctor.server import failed

    return [failed("capture", f"{section.name} ({found.where})", found)]


def of_quorum(settings: "Config", *, reach: bool = True, admin: str | None = None) -> list[Finding]:
    """The findings about the server whose commits wait for safekeepers, and with `reach` about the safekeepers, if any."""
    section = settings.quorum_source
    if section is None:
        return []
    from walsender_bridge.doctor.server import examine_quorum
    from walsender_bridge.observability import quorum_view
    from walsender_bridge.provisioning import release_record
    from walsender_bridge.quorum.proposer import status_record

    found = examine_quorum(
        needed_quorum(settings),
        settings.safekeepers.proposed_to if reach else (),
        settings.safekeepers.max_laggard_bytes,
        status_record.read(settings.proposer_status),
        admin,
        settings.tls_files,
    )
    seen = quorum_view.observe(settings)
    found += [
        Finding(
            "catch-up",
            "safekeepers",
            note,
            Severity.WARNING,
            repair="list the other safekeepers first in primary_conninfo until keep_bytes of WAL have been written",
        )
        for note in (seen.notes if seen else ())
    ]
    released = release_record.in_force(settings.data_dir)
    if seen is not None and seen.memory_full:
        found.append(
            Finding(
                "memory",
                "this machine",
                f"{seen.memory_full}: safekeepers and proposer cannot write their status files",
                Severity.ERROR,
                repair="free space there; PostgreSQL's dynamic shared memory may use it, too",
                cause=Cause.DISK_FULL,
                prevents=False,
            )
        )
    if released is not None:
        found.append(
            Finding(
                "quorum release",
                released.server,
                released.summary(),
                Severity.WARNING,
                repair="run tuskline quorum require once the quorum is back",
            )
        )
    return found


def of_slots(settings: "Config") -> list[Finding]:
    """The findings about the slots of the primary and its failover candidates; none without `[slots]`."""
    if settings.slots is None:
        return []
    from walsender_bridge.doctor import slots

    candidates = {name: (each.dsn, each.slot) for name, each in settings.slots.candidates.items()}
    return [*slots.examine(settings.slots_dsn, candidates)]


def of_etcd(settings: "Config") -> list[Finding]:
    """The findings about the cluster of `[etcd]`; none without that section."""
    from walsender_bridge.doctor import etcd
    from walsender_bridge.observability import etcd_view

    seen = etcd_view.observe(settings)
    return [] if seen is None else [*etcd.examine(seen)]


def of_log(settings: "Config") -> Iterator[Finding]:
    """The faults of the log's streams or, if the log does not answer, its damaged files here; and the lake's problems."""
    from walsender_bridge.doctor import log as files
    from walsender_bridge.doctor import parts as doctor_parts
    from walsender_bridge.doctor.server import failed
    from walsender_bridge.observability import log_problems, log_server_folders

    yield from files.log_servers(log_server.data_dir for log_server in settings.hosted_log_servers)
    for listen, error in log_server_folders.lost(settings).items():
        yield failed(f"log server {listen}", error.where, error)
    if not settings.asks_log:
        return
    try:
        status = log_problems.log_status(settings)
    except TusklineError as error:
        if "repository" in settings.parts:
            yield from files.repository(settings.repository_dir / "repository.sqlite")
        else:
            yield Finding("log", error.where, error.what, Severity.WARNING, repair=error.repair)
        yield from doctor_parts.of_lake(settings, None)
        return
    for fault in status.faults.values():
        yield failed("log", fault.where, fault)
    damage = log_problems.damaged(status)
    if damage is not None:
        yield failed("log", damage.where, damage)
    described = log_problems.described(settings)
    yield from files.degraded(log_problems.as_configured(settings, described.streams))
    yield from files.leases(described.consumers)
    yield from doctor_parts.of_lake(settings, status.log_id)


def of_machine(settings: "Config") -> list[Finding]:
    """The findings about this machine."""
    from walsender_bridge.doctor import machine

    owner = "[log]" if settings.machine is None else "[machine]"
    folders = {f"{owner} data_dir": settings.data_dir}
    if settings.log.data_dir not in {None, settings.data_dir}:
        folders["[log] data_dir"] = settings.repository_dir
    folders |= {
        f"[[log_server]] {each.listen}": each.data_dir for each in settings.hosted_log_servers
    }
    found = [*machine.examine(folders)]
    section = settings.safekeepers
    if "safekeepers" in settings.parts:
        from walsender_bridge.doctor.server import failed
        from walsender_bridge.quorum.safekeeper.hosting import of_machine as hosted_here
        from walsender_bridge.quorum.safekeeper.hosting import refused

        places = hosted_here(settings)
        found += [failed("data directory", e.where, e) for e in refused(places).values()]
        found += machine.laggard_room(
            {each.name: each.data_dir for each in places},
            section.wal_bytes,
            section.free_bytes,
            section.max_laggard_bytes,
        )
    if settings.lake is not None and "lake" in settings.parts:
        found += [*_lake(settings.lake), *_spark(settings.lake)]
    return found


def _lake(lake: "LakeSection") -> Iterator[Finding]:
    from spark_consumers.lake import folder
    from walsender_bridge.doctor import machine
    from walsender_bridge.doctor.server import failed
    from walsender_bridge.observability.lake_chain import store_options

    try:
        free = folder.check(lake.uri, store_options(lake))
    except TusklineError as error:
        yield failed("lake", error.where, error)
    else:
        if free is None:
            yield Finding("lake", lake.uri, "the bucket is writable, and creates an object once")
        else:
            yield machine.room("[lake] uri", Path(lake.uri), free)


def _spark(lake: "LakeSection") -> Iterator[Finding]:
    from spark_consumers.spark import given, requirements, versions
    from walsender_bridge.doctor.server import failed

    found = versions.here()
    for problem in found:
        yield Finding(
            "spark",
            "this machine",
            problem.what,
            Severity.ERROR if problem.fatal else Severity.WARNING,
            repair=problem.repair,
            cause=Cause.NOT_SUPPORTED,
        )
    if any(problem.fatal for problem in found):
        return
    if not found:
        works = f"{versions.combination()}: this combination works"
        yield Finding("spark", "this machine", works)
    unmet = requirements.unmet(given.here())
    if unmet is not None:
        yield failed("spark", "this machine", unmet)
        return
    yield from _executors(lake)


def _executors(lake: "LakeSection") -> Iterator[Finding]:
    """What the executors lack, unless they are on this machine with this Python."""
    from spark_consumers.spark import executors
    from spark_consumers.spark.failures import SPARK_ERRORS
    from spark_consumers.spark.session import master_of, python_of, session, submitted
    from walsender_bridge.doctor.server import failed
    from walsender_bridge.observability.lake_chain import lake_chain

    master = master_of(lake.spark_master)
    if executors.are_like_driver(master, python_of()) and not submitted():
        return
    try:
        spark = session(
            "tuskline-doctor",
            lake.spark_master,
            lake=lake.uri,
            endpoint=lake.endpoint,
            region=lake.region,
        )
        try:
            place = lake_chain(lake).root
            seen = executors.look(spark, place)
            errors = [*executors.lacking(executors.here(place), seen)]
        finally:
            spark.stop()
    except TusklineError as error:
        yield failed("executors", master, error)
        return
    except SPARK_ERRORS as error:
        yield Finding(
            "executors",
            master,
            f"no session can be started there: {str(error).partition(chr(10))[0][:300]}",
            Severity.ERROR,
            repair="check [lake] spark_master, or Spark's own setting spark.master",
            cause=Cause.UNAVAILABLE,
        )
        return
    for lacking in errors:
        yield failed("executors", lacking.where, lacking)
    if not errors:
        hosts = ", ".join(sorted({each.host for each in seen}))
        yield Finding("executors", master, f"on {hosts}, they have what the driver has")


def _count(findings: list[Finding], severity: Severity) -> int:
    return sum(each.severity is severity for each in findings)


def _script(parts: Sequence[tuple[str, str, list[Finding]]]) -> str:
    """The script of all repairs. `parts`: the name of each part, the DSN of its server, and its findings."""
    from walsender_bridge.provisioning.fixes import comment, connect

    lines = [
        "-- Review this script, then run it in psql as a superuser or as the owner of the tables."
    ]
    needed = [(name, dsn, [each for each in found if each.fix]) for name, dsn, found in parts]
    needed = [each for each in needed if each[2]]
    for name, dsn, fixes in needed:
        lines += ["", comment(f"For {name}: {fixes[0].where}")]
        if len(needed) > 1:
            lines.append(connect(dsn))
        # The repair of a synchronous standby that never answers must not wait for it.
        lines += ["SET synchronous_commit = local;"]
        # Several candidates may need the same repair on their primary. The order is kept: later repairs may depend on earlier ones.
        once: dict[str, Finding] = {}
        for each in fixes:
            once.setdefault(each.fix, each)
        for each in once.values():
            lines += ["", comment(f"{each.check}: {each.what}"), each.fix]
    return "\n".join(lines)


def _print(output: Output, findings: list[Finding]) -> None:
    for each in findings:
        output.line(f"{each.severity.name.lower():8} {each.where}: {each.check}: {each.what}")
        if each.repair and each.severity is not Severity.OK:
            output.line(f"{'':8} HINT:  {each.repair}")
    errors, warnings = _count(findings, Severity.ERROR), _count(findings, Severity.WARNING)
    output.note(f"{counted(errors, 'error')}, {counted(warnings, 'warning')}")
