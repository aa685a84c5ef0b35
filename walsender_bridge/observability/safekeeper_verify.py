"""`tuskline safekeeper verify`: the data directories, the progress and the report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from walsender_bridge.config import Config
from walsender_bridge.errors import ConfigError, TusklineError
from walsender_bridge.observability.quorum_view import STALE
from walsender_bridge.observability.verify_bar import verify_bar
from walsender_bridge.postgres.protocol.lsn import format_lsn, parse_lsn
from walsender_bridge.quorum.safekeeper import hosting, verify
from walsender_bridge.quorum.safekeeper.status_record import SafekeeperStatus
from walsender_bridge.quorum.safekeeper.verify import DataDirectory, HeldWal
from walsender_bridge.runtime import status_file
from walsender_bridge.runtime.output import Output


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """`record`: plain values; `errors`: all errors, those of single safekeepers first."""

    record: dict[str, Any]
    errors: list[TusklineError]


#: A data directory, and how to read its status again while its safekeeper runs.
PlaceToVerify = tuple[DataDirectory, Callable[[], DataDirectory] | None]


def named(folders: Sequence[Path]) -> list[PlaceToVerify]:
    """Data directories by their paths. Raises `ConfigError` for one that does not exist."""
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError("the directory does not exist", where=str(folder))
    return [(DataDirectory(str(folder), folder), None) for folder in folders]


def hosted_places(settings: Config) -> list[PlaceToVerify]:
    """The data directories of the safekeepers of this machine. Raises `ConfigError` if there are none."""
    hosted = hosting.of_machine(settings)
    if not hosted:
        raise ConfigError(
            "this machine hosts no safekeeper",
            repair="run the command on a machine that hosts one, or use --data-dir",
        )

    def place(each: hosting.Hosted) -> DataDirectory:
        own = status_file.read(each.status, SafekeeperStatus)
        if own is None or not own.fresh(STALE):
            return DataDirectory(each.name, each.data_dir)
        lsns = parse_lsn(own.flush_lsn), parse_lsn(own.commit_lsn)
        return DataDirectory(each.name, each.data_dir, *lsns)

    return [(place(each), partial(place, each)) for each in hosted]


def run(places: Sequence[PlaceToVerify], output: Output) -> VerifyReport:
    """Verify each data directory, then compare them."""
    held: list[HeldWal] = []
    errors: list[TusklineError] = []
    rows = []
    with verify_bar(output) as progress:
        for place, reread in places:
            row: dict[str, Any] = {"safekeeper": place.name, "whole": True}
            try:
                found = verify.check(place, progress, reread)
            except TusklineError as error:
                errors.append(error)
                rows.append({**row, "whole": False, **dict.fromkeys(_COLUMNS)})
                continue
            held.append(found)
            rows.append({**row, **_row(found)})
        compared, difference = 0, None
        try:
            difference, compared = verify.compare(held, progress)
        except TusklineError as error:
            errors.append(error)
    if difference is not None:
        errors.append(difference.error())
    record = {
        "safekeepers": rows,
        "compared_bytes": compared,
        "equal": difference is None and not errors,
        "first_difference": None if difference is None else format_lsn(difference.lsn),
        "errors": [error.to_wire() for error in errors],
    }
    return VerifyReport(record, errors)


_COLUMNS = ("begin_lsn", "end_lsn", "commit_lsn", "records")


def _row(found: HeldWal) -> dict[str, Any]:
    lsns = (found.begin_lsn, found.end_lsn, found.commit_lsn)
    return dict(zip(_COLUMNS, (*map(format_lsn, lsns), found.records), strict=True))
