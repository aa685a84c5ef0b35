"""Checks of the configured parts on this machine: their ports, their processes, the lake's tables."""

import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPException
from typing import TYPE_CHECKING, Final

from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.doctor.server import failed
from walsender_bridge.errors import (
    Cause,
    ConfigError,
    NotLeaderError,
    PrivilegeError,
    RunningError,
    TusklineError,
)
from walsender_bridge.observability import (
    delta_view,
    equality_view,
    lake_status,
    maintenance_view,
    table_problems,
)
from walsender_bridge.observability.lake_chain import lake_chain
from walsender_bridge.runtime import certificate_holder, listening, pid_file

if TYPE_CHECKING:
    from walsender_bridge.config import Config, LakeSection, SourceSection
    from walsender_bridge.runtime.tls_files import TlsFiles

#: Seconds to wait for the answer of a part of Tuskline.
_ANSWER_SECONDS: Final = 3.0


def of_ports(settings: "Config") -> Iterator[Finding]:
    """Why a part that is not running could not start: another configuration's part has its folder, or its address is taken."""
    if pid_file.owner(settings.run_dir):
        return
    here = "repository" in settings.parts
    places = [("bridge", settings.log.listen, settings.run_dir)] if here else []
    places += [
        ("log-server", log_server.listen, log_server.data_dir)
        for log_server in settings.hosted_log_servers
    ]
    if settings.metrics is not None:
        places.append(("metrics", settings.metrics.listen, settings.run_dir))
    for part, address, folder in places:
        if pid_file.owner(settings.run_dir, part):
            continue
        try:
            pid_file.refuse_while_running(folder, part)
            listening.check(address)
        except RunningError as error:
            # It belongs to another configuration: this one's part would have its lock in the run folder, too.
            yield failed(f"folder of the {part}", error.where, error)
        except ConfigError as error:
            alike = _is_alike(part, address, settings.tls_files)
            yield (
                _taken(part, address) if alike else failed(f"address of the {part}", address, error)
            )


def _taken(part: str, address: str) -> Finding:
    """The finding about an address that a part of the same kind has. `up` starts without metrics, which may run by themselves."""
    return Finding(
        f"address of the {part}",
        address,
        f"the {part} of another configuration listens there",
        Severity.WARNING if part == "metrics" else Severity.ERROR,
        repair="stop it with its own configuration (`tuskline down`), or choose another `listen`",
        cause=Cause.CONFIG,
    )


def _is_alike(part: str, address: str, tls: "TlsFiles | None") -> bool:
    """Whether the listener is the same kind of part, of another configuration or account."""
    from walsender_bridge.change_log.client import LogClient
    from walsender_bridge.change_log.repository.log_server_link import LogServerLink

    try:
        match part:
            case "bridge":
                with LogClient(address, timeout=_ANSWER_SECONDS, tls=tls) as log:
                    log.status()
            case "log-server":
                with closing(LogServerLink(address, tls)) as log_server:
                    log_server.report()
            case _:
                with urllib.request.urlopen(f"http://{address}/healthz", timeout=_ANSWER_SECONDS):
                    pass
    except (PrivilegeError, NotLeaderError):
        return True
    except (TusklineError, OSError, HTTPException):
        return False
    return True


def of_processes(settings: "Config") -> Iterator[Finding]:
    """The processes that keep failing, or have ended for good; nothing if none runs."""
    from walsender_bridge.observability.observation import seen_processes

    now = time.time()
    up = pid_file.owner(settings.run_dir)
    for process in seen_processes(settings.run_dir, up) if up is not None else ():
        for what in process.problems(now):
            yield Finding(
                "process",
                "this machine",
                what,
                Severity.ERROR,
                repair="read its log for the cause; `tuskline status` shows the number of restarts",
                cause=Cause.UNAVAILABLE,
                prevents=False,
            )


def of_certificate(settings: "Config") -> Iterator[Finding]:
    """The certificate of `[tls]` that expires within two weeks, has expired, or cannot be used."""
    from walsender_bridge.observability import certificate_view

    its, now = certificate_view.observe(settings), time.time()
    if its is None:
        return
    if what := its.problem(now):
        severity = Severity.ERROR if its.is_over(now) else Severity.WARNING
        repair = its.error.repair if its.error is not None else certificate_view.REPAIR
        yield Finding("certificate", its.file, what, severity, repair=repair, cause=Cause.CONFIG)
    else:
        days = int((its.ends - now) // 86_400)
        yield Finding("certificate", its.file, f"is valid for {days} days")


def of_hosts(settings: "Config") -> Iterator[Finding]:
    """The addresses of the log's services here under which no other machine reaches them, or which the certificate does not name."""
    from walsender_bridge.observability import certificate_view

    files = settings.tls_files
    if files is None:
        return
    for key, address in certificate_view.log_services(settings):
        host = certificate_view.host_of(address)
        if listening.is_wildcard(host):
            yield Finding(
                "address",
                key,
                f"{address} is no address under which another machine reaches this one",
                Severity.ERROR,
                repair="name the address or the host name that the other machines use, and have the certificate name it",
                cause=Cause.CONFIG,
            )
            continue
        # `of_certificate` reports files that do not fit.
        with suppress(ConfigError, PrivilegeError):
            if what := _unnamed(files, host):
                yield Finding(
                    "certificate",
                    str(files.certificate),
                    f"{what}, the host of {key}: no client accepts it there",
                    Severity.ERROR,
                    repair=f"issue one with `tuskline certs issue --host {host}`, or correct listen (docs/certificates.md)",
                    cause=Cause.CONFIG,
                )


def _unnamed(files: "TlsFiles", host: str) -> str:
    """What the certificate lacks for a service of the log at this host, up to the host; empty: nothing. Raises as `load`."""
    if not files.names(host):
        return f"it does not name {host}"
    names = files.load(ended=True).names
    holder = certificate_holder.of_certificate({"subjectAltName": names})
    what = certificate_holder.lacks_service_name(holder, names, [host])
    return what and f"{what}, which stands for {host}"


def of_former_sources(settings: "Config", section: "SourceSection") -> Iterator[Finding]:
    """The slots on the source's server of sources that are no longer configured."""
    from walsender_bridge.capture import source as capture
    from walsender_bridge.observability import former_sources
    from walsender_bridge.provisioning.configured import capture_source

    formers = former_sources.former_sources(settings)
    # Other checks report a server that cannot be reached.
    with suppress(TusklineError), capture.connect(capture_source(section)) as connection:
        for each in former_sources.left_slots(connection, formers):
            where = f"database {each.database}"
            yield Finding("slot", where, each.what, Severity.WARNING, repair=each.repair)


def of_lake(settings: "Config", log_id: str | None) -> Iterator[Finding]:
    """Why the lake does not continue, and which of its tables do not follow. `log_id`: of the log, if it answers."""
    if settings.lake is None or "lake" not in settings.parts:
        return
    from spark_consumers.lake.status import moved, read_status

    uri, moved_at = settings.lake.uri, 0.0
    with suppress(TusklineError, OSError):
        # The check of the folder reports what cannot be read.
        chain = lake_chain(settings.lake)
        if (head := chain.head()) is not None:
            for each in table_problems.problems(head):
                yield _of_table(each, Severity.ERROR)
            for each in table_problems.misnamed(head):
                yield _of_table(each, Severity.WARNING)
            moved_at = moved(head, read_status(chain), time.time())
    problem = lake_status.problem(settings.run_dir, uri, moved_at)
    errors = (_of_another_log(settings.lake, log_id), problem)
    yield from _of_maintenance(settings.lake)
    yield from _of_equality(settings.lake)
    yield from _of_delta(settings.lake)
    reported: set[str] = set()
    for error in errors:
        if error is not None and error.what not in reported:
            reported.add(error.what)
            yield failed("lake", error.where or uri, error)


def _of_maintenance(lake: "LakeSection") -> Iterator[Finding]:
    """Why data files are not rewritten, although the configuration says so and there is a lake."""
    with suppress(TusklineError, OSError):
        chain = lake_chain(lake)
        if not lake.maintenance.enabled or not chain.exists():
            return
        what = maintenance_view.trouble(maintenance_view.observe(chain), lake.maintenance.interval)
        if what:
            yield Finding(
                "lake maintenance",
                lake.uri,
                what,
                Severity.WARNING,
                repair="run `tuskline lake maintain` (`tuskline up` does), and read its log; or set [lake.maintenance] enabled = false",
            )


def _of_equality(lake: "LakeSection") -> Iterator[Finding]:
    """The differences that `tuskline verify` has found last."""
    from spark_consumers.lake.equality.record import read_record

    with suppress(TusklineError, OSError):
        what = equality_view.trouble(read_record(lake_chain(lake)))
        if what:
            yield Finding(
                "equality of the lake",
                lake.uri,
                what,
                Severity.WARNING,
                repair=equality_view.REPAIR,
            )


def _of_delta(lake: "LakeSection") -> Iterator[Finding]:
    """The tables whose Delta logs are behind."""
    from spark_consumers.lake.delta_log.record import read_record

    with suppress(TusklineError, OSError):
        what = delta_view.trouble(read_record(lake_chain(lake).store)) if lake.has_delta else ""
        if what:
            yield Finding(
                "Delta logs of the lake",
                lake.uri,
                what,
                Severity.WARNING,
                repair=delta_view.REPAIR,
            )


def _of_another_log(lake: "LakeSection", log_id: str | None) -> TusklineError | None:
    """Why the lake cannot continue with this log; None if it can, or no log answers."""
    from spark_consumers.lake import folder
    from spark_consumers.lake.writer import adopt

    try:
        return None if log_id is None else adopt.trouble(lake_chain(lake), log_id)
    except (TusklineError, OSError) as error:
        return folder.why(error, lake.uri)


def _of_table(problem: table_problems.TableProblem, severity: Severity) -> Finding:
    return Finding(
        problem.kind,
        problem.table,
        problem.what,
        severity,
        repair=problem.repair,
        cause=Cause.LAKE,
        prevents=False,
    )
