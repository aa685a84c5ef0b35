"""What `doctor` finds in the parts of one configuration on this machine: their ports, their processes, the lake's tables."""

import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPException
from typing import TYPE_CHECKING, Final

from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.doctor.server import failed
from walsender_bridge.errors import Cause, ConfigError, TusklineError
from walsender_bridge.observability import lake_status, table_problems
from walsender_bridge.runtime import listening, pid_file

if TYPE_CHECKING:
    from walsender_bridge.config import Config, SourceSection

#: Seconds in which a part of ours answers.
_ANSWER_SECONDS: Final = 3.0


def of_ports(settings: "Config") -> Iterator[Finding]:
    """The addresses where a part that does not run now could not listen."""
    places = [("bridge", settings.log.listen, settings.run_dir)]
    places += [
        ("log-server", log_server.listen, log_server.data_dir) for log_server in settings.log_server
    ]
    if settings.metrics is not None:
        places.append(("metrics", settings.metrics.listen, settings.run_dir))
    for part, address, folder in places:
        if pid_file.owner(settings.run_dir) or pid_file.owner(folder, part):
            continue
        try:
            listening.check(address)
        except ConfigError as error:
            if not _is_ours(part, address):
                yield failed(f"address of the {part}", address, error)


def _is_ours(part: str, address: str) -> bool:
    """Whether what listens there is such a part, which another configuration or account runs."""
    from walsender_bridge.change_log.client import LogClient
    from walsender_bridge.change_log.repository.log_server_link import LogServerLink

    try:
        match part:
            case "bridge":
                with LogClient(f"grpc://{address}", timeout=_ANSWER_SECONDS) as log:
                    log.status()
            case "log-server":
                with closing(LogServerLink(f"grpc://{address}")) as log_server:
                    log_server.report()
            case _:
                with urllib.request.urlopen(f"http://{address}/healthz", timeout=_ANSWER_SECONDS):
                    pass
    except (TusklineError, OSError, HTTPException):
        return False
    return True


def of_processes(settings: "Config") -> Iterator[Finding]:
    """The processes that end again and again, or have ended for good; nothing where none runs."""
    from walsender_bridge.observability.observation import seen_processes

    now = time.time()
    up = pid_file.owner(settings.run_dir)
    for process in seen_processes(settings.run_dir, up) if up is not None else ():
        for what in process.ill(now):
            yield Finding(
                "process",
                "this machine",
                what,
                Severity.ERROR,
                repair="its log says why; `tuskline status` shows how often it was started",
                cause=Cause.UNAVAILABLE,
                prevents=False,
            )


def of_former_sources(settings: "Config", section: "SourceSection") -> Iterator[Finding]:
    """The slots on the source's server that sources have left which are not configured any more."""
    from walsender_bridge.capture import source as capture
    from walsender_bridge.observability import former_sources
    from walsender_bridge.provisioning.configured import capture_source

    formers = former_sources.former_sources(settings)
    # A server that cannot be asked is told by those who ask more of it.
    with suppress(TusklineError), capture.connect(capture_source(section)) as connection:
        for each in former_sources.left_slots(connection, formers):
            where = f"database {each.database}"
            yield Finding("slot", where, each.what, Severity.WARNING, repair=each.repair)


def of_lake(settings: "Config", log_id: str | None) -> Iterator[Finding]:
    """Why the lake does not go on, and which of its tables do not. `log_id`: of the log, if it answers."""
    if settings.lake is None:
        return
    from spark_consumers.lake import folder
    from spark_consumers.lake.manifest.chain import open_chain
    from spark_consumers.lake.writer import adopt

    uri = settings.lake.uri
    with suppress(TusklineError, OSError):
        # What cannot be read is told by those who look at the folder.
        head = open_chain(uri).head()
        for each in table_problems.troubles(head) if head is not None else ():
            yield _of_table(each)
    errors = [None, lake_status.trouble(settings.run_dir, uri)]
    try:
        errors[0] = None if log_id is None else adopt.trouble(uri, log_id)
    except (TusklineError, OSError) as error:
        errors[0] = folder.why(error, uri)
    told: set[str] = set()
    for error in errors:
        if error is not None and error.what not in told:
            told.add(error.what)
            yield failed("lake", error.where or uri, error)


def _of_table(trouble: table_problems.Trouble) -> Finding:
    return Finding(
        "table",
        trouble.table,
        trouble.what,
        Severity.ERROR,
        repair=trouble.repair,
        cause=Cause.LAKE,
        prevents=False,
    )
