"""The page by which commit gates that wait for the safekeepers decide: one that is not proven fresh holds them."""

import pytest

from walsender_bridge.runtime.commit_page import (
    STALE_SECONDS,
    CommitPage,
    CommitPageReader,
    CommitPageWriter,
)

SYSTEM, TIMELINE = 7_000_000_000_000_000_001, 3
PAGE = CommitPage(SYSTEM, TIMELINE, 0x1000)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "commit.page"


@pytest.fixture
def writer(path):
    return CommitPageWriter(path)


@pytest.fixture
def reader(path, clock):
    return CommitPageReader(path, clock)


def renewed(writer, reader, page=PAGE):
    """What a reader makes of a page that was renewed since it was looked at last."""
    for _ in range(2):
        writer.write(page)
        found = reader.committed(SYSTEM, TIMELINE)
    return found


def test_a_page_counts_once_it_was_renewed(writer, reader):
    writer.write(PAGE)
    lsn, why = reader.committed(SYSTEM, TIMELINE)
    assert (lsn, why) == (None, "the safekeepers' proposer has not renewed its page yet")
    writer.write(PAGE)
    assert reader.committed(SYSTEM, TIMELINE) == (0x1000, "")


def test_a_missing_page_holds(reader, path):
    lsn, why = reader.committed(SYSTEM, TIMELINE)
    assert lsn is None
    assert why.endswith(f"{path} is missing")


def test_a_page_that_is_not_renewed_holds_after_five_seconds(writer, reader, clock):
    assert renewed(writer, reader) == (0x1000, "")
    clock.now += STALE_SECONDS
    assert reader.committed(SYSTEM, TIMELINE) == (0x1000, "")
    clock.now += 1
    lsn, why = reader.committed(SYSTEM, TIMELINE)
    assert lsn is None
    assert "has not renewed" in why
    assert "for 6 s" in why
    assert renewed(writer, reader) == (0x1000, "")


def test_a_page_of_an_earlier_boot_never_counts(writer, path, clock):
    writer.write(PAGE)
    later = CommitPageReader(path, clock)
    for _ in range(10):
        lsn, why = later.committed(SYSTEM, TIMELINE)
        assert lsn is None
        clock.now += 1
    assert "for 9 s" in why


def test_a_proposer_that_was_started_again_is_believed(writer, reader, path):
    assert renewed(writer, reader) == (0x1000, "")
    CommitPageWriter(path).write(CommitPage(SYSTEM, TIMELINE, 0x2000))
    assert reader.committed(SYSTEM, TIMELINE) == (0x2000, "")


def test_every_changed_byte_holds(writer, reader, path):
    assert renewed(writer, reader) == (0x1000, "")
    writer.write(PAGE)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        lsn, why = reader.committed(SYSTEM, TIMELINE)
        assert lsn is None, at
        assert f"{path} is damaged" in why
    path.write_bytes(whole[:-1])
    assert reader.committed(SYSTEM, TIMELINE)[0] is None


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (CommitPage(SYSTEM + 1, TIMELINE, 9), "the safekeepers have the WAL of another server"),
        (CommitPage(SYSTEM, TIMELINE - 1, 9), "the safekeepers are on timeline 2"),
        (CommitPage(SYSTEM, TIMELINE, 0), "the safekeepers' proposer does not know yet what"),
        (CommitPage(why="the safekeepers' proposer: connection refused"), "connection refused"),
    ],
)
def test_what_is_not_of_this_server_and_timeline_holds(writer, reader, page, why):
    lsn, found = renewed(writer, reader, page)
    assert lsn is None
    assert why in found


def test_a_lost_quorum_keeps_what_it_had_and_says_why(writer, reader):
    page = CommitPage(SYSTEM, TIMELINE, 0x1000, "the safekeepers have no quorum")
    assert renewed(writer, reader, page) == (0x1000, "the safekeepers have no quorum")


def test_a_page_that_cannot_be_written_is_a_fault_until_it_can(tmp_path, clock, capsys):
    path = tmp_path / "memory" / "commit.page"
    writer, reader = CommitPageWriter(path), CommitPageReader(path, clock)
    for _ in range(3):
        writer.write(PAGE)
        assert writer.fault == f"{path} cannot be written: No such file or directory"
    assert reader.committed(SYSTEM, TIMELINE)[0] is None
    said = capsys.readouterr()
    assert (said.out + said.err).count("could not write the commit page") == 1
    path.parent.mkdir()
    assert renewed(writer, reader) == (0x1000, "")
    assert writer.fault == ""
