"""A child receives its settings from its supervisor, as itself or not at all."""

import asyncio
import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

from tests.support.waiting import wait_for
from walsender_bridge.errors import Cause
from walsender_bridge.runtime import child_process, json_model
from walsender_bridge.runtime.supervisor import Child, Supervisor, read_states


@dataclass(frozen=True, slots=True)
class Inner:
    ratio: float
    action: Literal["block", "degrade"] = "block"


class Place(NamedTuple):
    timeline: int
    name: str


@dataclass(frozen=True, slots=True)
class Outer:
    dsn: str
    folder: Path
    names: tuple[str, ...]
    addresses: tuple[tuple[str, int], ...]
    inner: Inner
    limit: int | None = None
    on: bool = False
    file: Path | None = None
    place: Place | None = None


WHOLE = Outer(
    "host=db password='pä \" ss'",
    Path("/srv/a b"),
    ("x", "!y*"),
    (("::1", 7410), ("db", 7411)),
    Inner(2.5, "degrade"),
    7,
    on=True,
    file=Path("f"),
    place=Place(1, "a"),
)


def test_a_record_is_read_as_it_was_written():
    least = Outer("", Path(), (), (), Inner(0.0))
    for each in (WHOLE, least):
        found = json_model.decode(Outer, json_model.encode(each), strict=True)
        assert found == each
        assert type(found.place) is type(each.place)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"limit": "secret"}, "limit is not of type int"),
        ({"limit": True}, "limit is not of type int"),
        ({"on": 1}, "on is not of type bool"),
        ({"dsn": None}, "dsn is not of type str"),
        ({"folder": 1}, "folder is not of type Path"),
        ({"names": "secret"}, "names is not of type array"),
        ({"names": ["a", 1]}, "names[1] is not of type str"),
        ({"addresses": [["db", 1, 2]]}, "addresses[0] is not of type array of 2"),
        ({"place": [1]}, "place is not of type array of 2"),
        ({"place": [1, 2]}, "place[1] is not of type str"),
        ({"inner": {"ratio": 1.0, "action": "secret"}}, "inner.action is none of block, degrade"),
        ({"inner": {}}, "inner.ratio is missing"),
        ({"inner": []}, "inner is not of type object"),
        ({"secrets": 1}, "secrets is unknown"),
    ],
)
def test_a_field_of_another_type_is_named_without_its_value(change, said):
    values = json.loads(json_model.encode(WHOLE)) | change
    with pytest.raises(ValueError, match=re.escape(said)) as found:
        json_model.decode(Outer, json.dumps(values).encode(), strict=True)
    assert "secret" not in str(found.value).replace("secrets is", "")


@pytest.mark.parametrize("document", [b"{", b"\xff", b"[" * 100_000, b"", b"[]", b"null"])
def test_what_is_no_record_is_one_sentence(document):
    with pytest.raises(ValueError, match=r"^the document is not (valid JSON|of type object)$"):
        json_model.decode(Outer, document, strict=True)


# -- a real child -----------------------------------------------------------------------------------


def run(stdin: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "walsender_bridge.change_log.log_server"],
        input=stdin,
        capture_output=True,
        timeout=60,
    )


def test_a_child_without_settings_names_the_command_that_starts_it():
    done = run(b"")
    assert done.returncode == Cause.UNAVAILABLE
    assert done.stderr.decode().splitlines() == [
        "error: this process received no settings on its standard input",
        "HINT:  `tuskline up` starts this process; if Tuskline was upgraded while it ran, restart `tuskline up`",
    ]


def test_a_child_that_is_started_on_a_terminal_does_not_wait_for_input():
    master, terminal = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "walsender_bridge.change_log.log_server"],
            stdin=terminal,
            capture_output=True,
            timeout=60,
        )
    finally:
        os.close(master)
        os.close(terminal)
    assert done.returncode == Cause.UNAVAILABLE
    assert b"received no settings" in done.stderr


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (b'{"data_dir": "secret"', b"the document is not valid JSON"),
        (b'{"data_dir": "secret"}', b"listen is missing"),
        (b'{"data_dir": 7, "listen": "secret"}', b"data_dir is not of type Path"),
    ],
)
def test_settings_that_are_malformed_are_named_without_their_content(document, said):
    done = run(document)
    assert done.returncode == Cause.UNAVAILABLE
    assert b"the settings on standard input are invalid: " + said in done.stderr
    assert b"if Tuskline was upgraded while it ran, restart" in done.stderr
    assert b"secret" not in done.stderr
    assert b"Traceback" not in done.stderr


def test_settings_without_an_end_are_read_up_to_the_limit():
    process = subprocess.Popen(
        [sys.executable, "-m", "walsender_bridge.change_log.log_server"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stderr is not None

    def flood(stdin=process.stdin) -> None:
        with contextlib.suppress(BrokenPipeError):
            while True:
                os.write(stdin.fileno(), b" " * (1 << 20))

    writer = threading.Thread(target=flood)
    writer.start()
    said = process.stderr.read()
    assert process.wait(60) == Cause.UNAVAILABLE
    writer.join(30)
    process.stderr.close()
    process.stdin.close()
    assert b"exceed 16 MiB" in said


# -- from a supervisor ------------------------------------------------------------------------------

CHILD = """
import os, pathlib, sys
from walsender_bridge.runtime import child_process
from tests.unit.test_child_process import Outer

def body(settings):
    null = os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev
    with open(settings.folder / "told", "a") as file:
        file.write(f"{settings == settings} {len(settings.names)} {null}\\n")

sys.exit(child_process.run(Outer, body))
"""


def supervised(folder: Path, child: Child, until) -> None:
    async def serve() -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(Supervisor("s", [child], run_dir=folder, grace=5).run(stop))
        await asyncio.to_thread(wait_for, until, 50, "the child was started")
        stop.set()
        await running

    asyncio.run(asyncio.wait_for(serve(), 60))


def test_each_start_of_a_child_gets_the_settings_again(tmp_path):
    # More than a pipe holds at once.
    names = tuple(f"public.table_{n:06}" for n in range(20_000))
    settings = Outer("", tmp_path, names, (), Inner(1.0))
    child = Child("c", [sys.executable, "-c", CHILD], stdin=json_model.encode(settings))
    told = tmp_path / "told"
    supervised(tmp_path, child, lambda: told.exists() and len(told.read_text().splitlines()) >= 2)
    assert set(told.read_text().splitlines()) == {"True 20000 True"}


def test_a_child_that_reads_nothing_holds_its_supervisor_up_in_nothing(tmp_path):
    big = b" " * (4 << 20)
    child = Child("c", [sys.executable, "-c", "import time; time.sleep(60)"], stdin=big)

    def runs() -> bool:
        state = read_states(tmp_path, "s").children.get("c")
        return state is not None and state.pid is not None

    supervised(tmp_path, child, runs)
    ending = Child("c", [sys.executable, "-c", ""], stdin=big)

    def again() -> bool:
        state = read_states(tmp_path, "s").children.get("c")
        return state is not None and state.restarts >= 2

    supervised(tmp_path, ending, again)


def test_a_password_is_not_in_the_text_of_a_child():
    assert "password" not in repr(child_process.child("c", "m", WHOLE))
