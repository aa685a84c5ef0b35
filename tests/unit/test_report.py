"""The page of a report: what is kept of observations, and what the charts show."""

import re
from html.parser import HTMLParser

import pytest

from spark_consumers.lake.manifest.chain import Manifest, StreamPosition
from spark_consumers.lake.manifest.table_version import TableVersion
from walsender_bridge.report import charts
from walsender_bridge.report.page import bytes_text, page, seconds_text
from walsender_bridge.report.recording import (
    Delay,
    EpochMark,
    Kill,
    Outage,
    Recording,
    Sample,
    StageLag,
    epoch_after,
    epochs,
    outages,
    problem_spans,
)


def _sample(at, lake=1, *, lag=0, problems=()):
    lags = (StageLag("north", "merge", lag, None if lag is None else lag / 100),)
    return Sample(at, lags, {"lake": lake, "bridge": 7}, tuple(problems), ())


def test_an_outage_lasts_until_another_process_runs():
    samples = [_sample(at, pid) for at, pid in ((0, 1), (1, 1), (2, None), (3, None), (4, 2))]
    assert outages(samples) == [Outage("lake", 1, 4)]


def test_a_process_that_came_back_between_two_samples_was_down():
    assert outages([_sample(0, 1), _sample(1, 2), _sample(2, 2)]) == [Outage("lake", 0, 1)]


def test_a_process_that_stays_away_is_down_until_the_end():
    assert outages([_sample(0, 1), _sample(1, None)]) == [Outage("lake", 0, None)]


def test_one_that_had_not_begun_was_not_down():
    assert outages([_sample(0, None), _sample(1, 1), _sample(2, 1)]) == []


def _link(number, epoch, before, at):
    return Manifest(
        "lake",
        number,
        epoch,
        before,
        1,
        at,
        seconds=0.5,
        changes=3,
        streams={"north": StreamPosition(1, 100, int((at - 2) * 1e6), 1)},
        tables={"north.public.t": TableVersion("t", "iceberg", 1, "", (), (), 5, 1, 10, 10)},
    )


def test_the_epochs_of_the_time_are_those_that_no_takeover_repeated():
    links = [
        _link(4, 30, 20, 400.0),
        _link(3, 20, 20, 300.0),  # a takeover
        _link(2, 20, 10, 200.0),
        _link(1, 10, 0, 100.0),
    ]
    found = epochs(iter(links), 150.0)
    assert [(mark.epoch, mark.at) for mark in found] == [(20, 200.0), (30, 400.0)]
    assert found[0].ages == {"north": 2.0}


def test_no_older_link_is_read_than_is_needed():
    def links():
        yield _link(2, 20, 10, 200.0)
        yield _link(1, 10, 0, 100.0)
        pytest.fail("an older link was read")

    assert len(epochs(links(), 150.0)) == 1


def test_a_kill_is_over_with_the_next_epoch():
    marks = [EpochMark(at, int(at), 1, 0.1, 1, {}) for at in (10.0, 20.0)]
    assert epoch_after(Kill(12.0, "driver"), marks) == 8.0
    assert epoch_after(Kill(21.0, "driver"), marks) is None


def test_a_problem_is_told_once_with_its_time():
    samples = [_sample(0), _sample(1, problems=["lake: gone"]), _sample(2, problems=["lake: gone"])]
    assert problem_spans(samples) == [("lake: gone", 1, 2)]


@pytest.mark.parametrize(
    ("value", "end"), [(0, 1), (0.3, 0.5), (1, 1), (1.1, 2), (7, 10), (0.02, 0.02), (950, 1000)]
)
def test_an_axis_ends_at_a_round_number(value, end):
    assert charts.nice(value) == pytest.approx(end)


def test_of_many_points_the_peaks_are_drawn():
    points = [(float(at), 1.0) for at in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    thin = charts.thinned(points)
    assert len(thin) <= 480
    assert (54_321.0, 99.0) in thin


def test_an_unknown_value_interrupts_a_line():
    span = charts.Span(0, 3)
    drawn = charts.lines(span, [charts.Line("a", [(0, 1), (1, 2), (2, None), (3, 1)])], str)
    lengths = [len(each.split()) for each in re.findall(r'points="([^"]*)"', drawn)]
    assert lengths == [2, 1]


def test_units_are_those_of_people():
    assert [bytes_text(n) for n in (0, 999, 1500, 2_000_000)] == ["0 B", "999 B", "1.5 kB", "2 MB"]
    assert [seconds_text(s) for s in (0, 0.25, 3.14, 59.6)] == ["0 s", "0.25 s", "3.1 s", "60 s"]


class _Elements(HTMLParser):
    """Names of elements; every one that is opened has to be closed."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.texts, self.links = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [value for name, value in attrs if name in {"src", "href", "xlink:href"}]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def _recording(samples, **given):
    marks = [EpochMark(100.0 + n, n, 1, 0.5, 10, {"north": 1.0 + n}) for n in range(1, 4)]
    return Recording("tuskline <demo>", 1.0, samples, marks, **given)


def test_the_page_needs_nothing_else_and_escapes_all_text():
    samples = [_sample(100.0), _sample(101.0, None, lag=500), _sample(102.0, 2, problems=["<b>&"])]
    made = page(
        _recording(samples, kills=[Kill(100.5, "driver")], figures={"transactions": "<i>1</i>"})
    )
    found = _Elements()
    found.feed(made)
    assert found.open == []
    assert found.links == []
    assert not {"script", "b>&", "i>1", "iframe", "link"} & set(found.seen)
    text = " ".join(found.texts)
    assert "<b>&" in text
    assert "<i>1</i>" in text
    # What the kill cost: the process was back after 1.5 s, the next epoch came after half a second.
    cells = re.findall(r"<td>([^<]*)</td>", made)
    assert cells[:5] == ["0:00.5", "driver", "lake", "1.5 s", "0.5 s"]


def test_with_commits_the_page_has_their_quantiles():
    delays = [Delay(100.0 + n / 100, float(n)) for n in range(1, 101)]
    made = page(_recording([_sample(100.0), _sample(103.0)], delays=delays))
    assert "<b>50 s</b><small>p50 from commit to epoch" in made or "<b>51 s</b>" in made


def test_a_page_of_nothing_is_a_page():
    found = _Elements()
    found.feed(page(Recording("empty", 1.0, [], [])))
    assert found.open == []
