"""An error crosses a process as itself: its cause, message, place and hint."""

import json

import pytest

from walsender_bridge.errors import Cause, TusklineError, from_wire, of_cause


#: `DIFFERENT` is the exit code of a comparison, and of no error.
@pytest.mark.parametrize("cause", [each for each in Cause if each is not Cause.DIFFERENT])
def test_an_error_of_each_cause_is_read_as_it_was_sent(cause: Cause) -> None:
    error = of_cause(cause, "could not", where="db:5432", repair="do this")
    found = from_wire(json.loads(json.dumps(error.to_wire())))
    assert type(found) is type(error)
    assert (found.cause, str(found)) == (cause, "db:5432: could not\nHINT:  do this")


def test_a_cause_of_a_newer_version_is_an_internal_error_with_its_message() -> None:
    found = from_wire({"code": "NEWER", "what": "could not"})
    assert type(found) is TusklineError
    assert found.what == "could not"
