"""Which errors of a walsender mean that a row is too large to be sent."""

import pytest

from walsender_bridge.capture.status import StatusFile
from walsender_bridge.capture.status_record import CaptureStatus
from walsender_bridge.cli.doctor import of_capture
from walsender_bridge.config import load_config
from walsender_bridge.doctor.finding import Severity
from walsender_bridge.errors import Cause, ConnectionFailedError, UnsupportedValueError
from walsender_bridge.observability.observation import Observation, Process, SourceView
from walsender_bridge.postgres.protocol.row_limit import unsendable_row
from walsender_bridge.runtime import status_file

WHERE = "db.example:5432/shop"
CONTEXT = 'slot "s", output plugin "pgoutput", in the change callback, associated LSN 1F/16D8660'
REQUEST = "invalid memory alloc request size"


@pytest.mark.parametrize(
    ("sqlstate", "text", "context"),
    [
        # What 11 to 18 say of a value, 11 to 17 of a row, and 18 of a row.
        ("XX000", f"{REQUEST} 1090519041", CONTEXT),
        ("54000", "out of memory", CONTEXT),
        ("54000", "string buffer exceeds maximum allowed length (1073741823 bytes)", CONTEXT),
        (
            "54000",
            "Speicher aufgebraucht",
            "Slot »s«, im Callback change, zugehörige LSN 1F/16D8660",
        ),
    ],
)
def test_a_row_that_is_too_large_is_named_by_its_lsn(sqlstate, text, context):
    error = unsendable_row(sqlstate, text, context, WHERE)
    assert isinstance(error, UnsupportedValueError)
    assert "1F/16D8660" in error.what
    assert text in error.what
    assert error.where == WHERE
    assert "--start=1F/16D8660" in error.repair
    assert "tuskline detach" in error.repair


@pytest.mark.parametrize(
    ("sqlstate", "text", "context"),
    [
        # Not while a row is sent: some minor versions fail so where many transactions run beside DDL.
        ("XX000", f"{REQUEST} 1090519041", ""),
        # A length that damage has changed.
        ("XX000", f"{REQUEST} 18446744073709551613", CONTEXT),
        # Memory that may be there next time.
        ("53200", "out of memory", CONTEXT),
        ("XX000", "could not open relation with OID 16384", CONTEXT),
    ],
)
def test_other_errors_are_not_taken_for_it(sqlstate, text, context):
    assert unsendable_row(sqlstate, text, context, WHERE) is None


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "tuskline.toml"
    path.write_text(
        '[log]\ndata_dir = "log"\n[[log_server]]\ndata_dir = "log-server"\nlisten = "127.0.0.1:7401"\n'
        '[[source]]\nname = "shop"\ndsn = "host=db.example"\n'
    )
    found = load_config(path)
    found.run_dir.mkdir(parents=True)
    return found


def test_status_and_doctor_say_why_the_capture_has_ended(settings):
    (section,) = settings.source
    error = unsendable_row("54000", "out of memory", CONTEXT, WHERE)
    assert error is not None
    assert of_capture(settings, section) == []
    StatusFile(settings.capture_status(section), "shop", "tuskline_shop").state("stopped", error)

    (found,) = of_capture(settings, section)
    assert found.severity is Severity.ERROR
    assert found.cause is Cause.UNSUPPORTED_VALUE
    assert found.what == error.what
    assert found.repair == error.repair

    told = status_file.read(settings.capture_status(section), CaptureStatus)
    process = Process("bridge/capture-shop", None, "ended", 0, 15, 0.0)
    view = SourceView("shop", "tuskline_shop", process, told, None, None)
    seen = Observation(0.0, None, [process], [view], None, None)
    assert "process bridge/capture-shop is ended (exit code 15, unsupported value)" in seen.problems
    assert f"capture of shop is stopped: {error.what}; {error.repair}" in seen.problems


def test_a_capture_that_is_tried_again_is_no_finding(settings):
    (section,) = settings.source
    away = ConnectionFailedError("connection refused", where=WHERE)
    StatusFile(settings.capture_status(section), "shop", "tuskline_shop").state("waiting", away)
    assert of_capture(settings, section) == []
