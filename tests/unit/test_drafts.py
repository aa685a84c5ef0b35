"""Drafts that crashes left in a lake: removed once nobody can give them their names."""

import os
import subprocess
import sys

import pytest

from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.manifest.reader_leases import ReaderLease
from spark_consumers.lake.store.drafts import GRACE, Drafts
from spark_consumers.lake.store.local_store import LocalStore
from spark_consumers.lake.writer import requests
from spark_consumers.lake.writer.presence import Presence

#: Makes a draft of each kind, and is killed before it gets its name.
DIES = """
import os, pathlib, signal, sys
from spark_consumers.lake.writer import requests
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.writer.presence import Presence
from spark_consumers.lake.manifest.reader_leases import ReaderLease
from spark_consumers.lake.store.local_store import LocalStore
lake, kind = pathlib.Path(sys.argv[1]), sys.argv[2]
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
os.link = pathlib.Path.rename = die
if kind == "requests":
    requests.ask(open_chain(lake), "pause", ["s.a.b"])
elif kind == "drivers":
    Presence(LocalStore(lake)).claim(1)
else:
    ReaderLease(LocalStore(lake))
"""


@pytest.fixture
def lake(tmp_path):
    open_chain(tmp_path).initialise("log", "iceberg")
    return tmp_path


class Sweeper:
    def __init__(self, lake):
        self.now = 0.0
        self.drafts = Drafts(lake / "_tuskline", clock=lambda: self.now)

    def sweep(self, after):
        self.now += after
        return self.drafts.sweep()


def left(lake):
    found = [*(lake / "_tuskline").rglob(".*")]
    return sorted(path.parent.name for path in found)


def test_what_a_killed_process_left_goes_after_a_while(lake):
    for kind in ("requests", "drivers", "readers"):
        subprocess.run([sys.executable, "-c", DIES, str(lake), kind], check=False)
    (lake / "_tuskline" / ".status-1.tmp").write_text("{")
    assert left(lake) == ["_tuskline", "drivers", "readers", "requests"]
    sweeper = Sweeper(lake)
    assert [sweeper.sweep(after) for after in (0, GRACE - 1, 2)] == [0, 0, 4]
    assert left(lake) == []
    assert (lake / "_tuskline" / "lake.json").exists()


@pytest.mark.parametrize("kind", ["requests", "drivers", "readers"])
def test_a_draft_of_a_living_process_stays_however_long_it_takes(lake, monkeypatch, kind):
    sweeper = Sweeper(lake)
    link, rename = os.link, type(lake).rename

    def slowly(done):
        def wait(*paths):
            assert [sweeper.sweep(after) for after in (0, GRACE, GRACE)] == [0, 0, 0]
            return done(*paths)

        return wait

    monkeypatch.setattr(os, "link", slowly(link))
    monkeypatch.setattr(type(lake), "rename", slowly(rename))
    if kind == "requests":
        made = requests.ask(open_chain(lake), "pause", ["s.a.b"])
        assert list(requests.waiting(open_chain(lake))) == [made]
    elif kind == "drivers":
        presence = Presence(LocalStore(lake))
        presence.claim(1)
        presence.close()
    else:
        assert not ReaderLease(LocalStore(lake)).is_lost()


def test_another_file_of_the_same_name_begins_anew(lake):
    sweeper = Sweeper(lake)
    draft = lake / "_tuskline" / ".status-7.tmp"
    draft.write_text("1")
    sweeper.sweep(0)
    (lake / "other").write_text("2")
    (lake / "other").replace(draft)
    assert sweeper.sweep(GRACE) == 0
    assert sweeper.sweep(GRACE) == 1
