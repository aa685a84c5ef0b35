"""Every status file: what its writer fills is what its readers get, and a file that is not whole is no status."""

import json
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
import typer

from spark_consumers.lake.status import CopyStatus, EpochStatus, LakeStatus
from tests.support import statuses
from walsender_bridge.capture.status import StatusFile
from walsender_bridge.capture.status_record import CaptureStatus
from walsender_bridge.change_log.repository.part import RepositoryStatus
from walsender_bridge.cli import safekeeper
from walsender_bridge.config import load_config
from walsender_bridge.errors import DivergedError
from walsender_bridge.observability import quorum_metrics, quorum_view
from walsender_bridge.observability.lake_status import LakeJobStatus
from walsender_bridge.quorum.proposer import status_record as proposer_record
from walsender_bridge.quorum.proposer.status import without_session
from walsender_bridge.quorum.proposer.status_record import SessionStatus
from walsender_bridge.quorum.safekeeper.hosting import hosted
from walsender_bridge.quorum.safekeeper.status_record import (
    ArchiveRecord,
    ArchiverStatus,
    CatchUpRecord,
    EndedSafekeeper,
)
from walsender_bridge.quorum.wal_server.status_record import (
    ReaderRecord,
    SlotRecord,
    WalServerStatus,
)
from walsender_bridge.runtime import json_model, status_file
from walsender_bridge.runtime.error_record import ErrorRecord
from walsender_bridge.runtime.status_file import Status
from walsender_bridge.runtime.supervisor import ChildState, SupervisorStates

ERROR = ErrorRecord.of(DivergedError("it differs", where="there", repair="look"))
READER = ReaderRecord("a:1", "wal", "standby", 1, "0/1000", "0/1000")
SLOT = SlotRecord("near", None, active=False, temporary=True, wal_status=None)
RECORDS = [
    statuses.capture(
        gate=statuses.gate(holding=("why",), stuck_since=5.0), error=ERROR, timeline=2
    ),
    statuses.session(safekeepers=(statuses.reported(),), rebuild=("a",)),
    without_session("ended", ERROR),
    statuses.safekeeper(
        archive=ArchiveRecord(None, unreserved=True, missing=(("0/0", "0/1"),)),
        catch_up=CatchUpRecord("0/0", "why"),
        new_members=("a", "b"),
    ),
    EndedSafekeeper(error=ERROR),
    ArchiverStatus(error=None),
    WalServerStatus(damaged=("one",), logins=1, readers=(READER,), slots=(SLOT,)),
    statuses.slots(slots=(statuses.slot_copy(failure=ERROR, evidence={"proven_at": 5}),)),
    LakeJobStatus(error=ERROR),
    RepositoryStatus(error=ERROR),
    SupervisorStates(1, {"lake": ChildState(7, "running", 1, -9, 5.0, 2)}),
    LakeStatus(
        *(5.0, 1, 2, {"shop.public.a": CopyStatus(1.0, 2, 3, 4, 5, 6.0, 7.0)}),
        EpochStatus(3, "write tables", 1.0, 2.0, tables=9, tables_done=4),
    ),
]
each_record = pytest.mark.parametrize("record", RECORDS, ids=lambda each: type(each).__name__)


@each_record
def test_a_reader_gets_what_the_writer_filled(record: Any, tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    if isinstance(record, Status):
        status_file.write(path, record)
    else:
        status_file.replace(path, json_model.encode(record))
    found = status_file.read(path, type(record))
    assert found is not None
    if isinstance(record, Status):
        assert found.fresh(60.0)
        record = replace(record, pid=found.pid, updated_at=found.updated_at)
    assert found == record
    assert json.loads(path.read_bytes()).keys() == {each.name for each in fields(record)}


@each_record
def test_a_file_that_lacks_a_field_or_has_another_type_in_it_is_no_status(
    record: Any, tmp_path: Path
) -> None:
    path = tmp_path / "status.json"
    whole = json_model.plain(record)
    path.write_text(json.dumps({**whole, "of a newer version": 1}))
    assert status_file.read(path, type(record)) == record
    for field in fields(record):
        others = {name: value for name, value in whole.items() if name != field.name}
        path.write_text(json.dumps(others))
        required = field.default is MISSING and field.default_factory is MISSING
        assert (status_file.read(path, type(record)) is None) == required
        wrongs: tuple[object, ...] = (["a"], {"a": {}}, -0.5)
        for wrong in wrongs:
            if isinstance(wrong, type(whole[field.name])):
                continue
            path.write_text(json.dumps({**others, field.name: wrong}))
            assert status_file.read(path, type(record)) is None, (field.name, wrong)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b"\xff", bytes(300), b"[" * 100_000, b'{"pid": 1']
)
def test_a_file_that_is_no_object_is_no_status(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    path.write_bytes(content)
    assert proposer_record.read(path) is None
    assert status_file.read(path, SupervisorStates) is None
    assert status_file.read(tmp_path / "none.json", SupervisorStates) is None


def test_a_capture_keeps_its_position_from_a_status_that_it_cannot_read_whole(
    tmp_path: Path,
) -> None:
    """As of another version, whose gate has other fields."""
    path = tmp_path / "capture.json"
    record = json_model.plain(
        CaptureStatus(source="shop", state="streaming", system_id=7, timeline=2, confirmed_lsn=5)
    )
    path.write_text(json.dumps({**record, "gate": {"unlike": 1}}))
    assert status_file.read(path, CaptureStatus) is None
    StatusFile(path, "shop", "s").state("connecting")
    kept = status_file.read(path, CaptureStatus)
    assert kept is not None
    assert (kept.system_id, kept.timeline, kept.confirmed_lsn) == (7, 2, 5)


def test_a_number_beyond_every_float_is_damage_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    path.write_text('{"updated_at": 1' + "0" * 400 + ', "error": null}')
    assert status_file.read(path, ArchiverStatus) is None


def test_the_first_wrong_field_is_named() -> None:
    record = json_model.plain(statuses.session(safekeepers=(statuses.reported(),)))
    record["safekeepers"][0]["lag_bytes"] = True
    with pytest.raises(ValueError, match=r"^safekeepers\[0\]\.lag_bytes is not of type int$"):
        json_model.from_plain(SessionStatus, record)


def test_a_session_without_a_field_still_has_the_phase(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    record = json_model.plain(statuses.session())
    path.write_text(json.dumps(record))
    assert isinstance(proposer_record.read(path), SessionStatus)
    del record["election_epoch"]
    path.write_text(json.dumps(record))
    found = proposer_record.read(path)
    assert found is not None
    assert (found.phase, isinstance(found, SessionStatus)) == ("leading", False)


CONFIG = """
[log]
data_dir = "log"
[[log_server]]
data_dir = "log-server"
listen = "127.0.0.1:7401"
[safekeepers]
local = 3
[[source]]
name = "shop"
dsn = "host=127.0.0.1"
"""


def test_a_safekeeper_that_ended_breaks_neither_metrics_nor_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "tuskline.toml"
    config.write_text(CONFIG)
    settings = load_config(config)
    places = hosted(settings.safekeepers, settings.hosted_log_servers[0].data_dir, settings.run_dir)
    one, two, three = places
    for path in (one.status, settings.proposer_status):
        path.parent.mkdir(parents=True, exist_ok=True)
    status_file.write(one.status, EndedSafekeeper(error=ERROR))
    status_file.write(two.status, statuses.safekeeper(election_epoch=4711))
    status_file.write(three.status, statuses.safekeeper(election_epoch=4712))
    reported = tuple(statuses.reported(address=each.listen) for each in places)
    status_file.write(settings.proposer_status, statuses.session(safekeepers=reported))
    seen = quorum_view.observe(settings)
    assert seen is not None
    assert seen.problems == [f"safekeeper {one.listen} is away: there: it differs; look"]
    epochs = [
        sample.value
        for family in quorum_metrics.families(seen)
        for sample in family.samples
        if sample.name == "tuskline_safekeeper_election_epoch"
    ]
    assert epochs == [4711, 4712]
    with pytest.raises(typer.Exit):
        safekeeper.status(config)
    assert "4711" in capsys.readouterr().out
