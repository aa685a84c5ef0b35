"""`tuskline top`: a live view. It shows an observation (`observation`) a second, and asks for nothing else."""

from collections.abc import Sequence
from threading import Event
from typing import ClassVar, Final

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.widgets import DataTable, Footer, Header, Static
from textual.worker import get_current_worker

from walsender_bridge.commands import lag
from walsender_bridge.commands.observation import Observation, Observer, SourceView
from walsender_bridge.config import Config
from walsender_bridge.printable import printable
from walsender_bridge.wire.lsn import format_lsn

#: Seconds between two looks.
EVERY: Final = 1.0
_UNKNOWN: Final = "-"

#: What is shown: a table's id, its title, its columns.
TABLES: Final = (
    ("processes", "processes", ("process", "pid", "state", "restarts", "memory MB", "CPU s")),
    ("streams", "streams", ("source", "state", "server", "logged", "confirmed", "slot holds")),
    ("lag", "lag", ("source", *lag.STAGES)),
    ("safekeepers", "safekeepers", ("safekeeper", "state", "term", "commit", "flush", "behind")),
    ("slots", "slots kept", ("slot", "candidate", "verdict", "reason", "age", "lag")),
    ("tables", "tables", ("table", "state", "rows", "versions behind", "seconds behind")),
)


class Top(App[None]):
    """The view. `q` ends it."""

    TITLE = "tuskline"
    CSS = """
    DataTable { height: auto; max-height: 40%; margin: 0 1 1 1; }
    #epoch, #ill { margin: 0 1; }
    #ill { color: $error; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [("q", "quit", "Quit")]

    def __init__(self, settings: Config, *, every: float = EVERY) -> None:
        super().__init__()
        self._settings = settings
        self._every = every

    def compose(self) -> ComposeResult:
        """The parts of the screen, top to bottom."""
        yield Header(show_clock=True)
        yield Static("looking", id="epoch")
        yield Static("", id="ill")
        for name, _, _ in TABLES:
            yield DataTable(id=name, cursor_type="none", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        """Name the columns, and begin to look."""
        for name, title, columns in TABLES:
            table = self.query_one(f"#{name}", DataTable)
            table.border_title = title
            table.add_columns(*columns)
        self._watch()

    @work(thread=True, exclusive=True)
    def _watch(self) -> None:
        """Look from a thread: a server that hangs must not make the view hang."""
        worker, pause = get_current_worker(), Event()
        with Observer(self._settings) as observer:
            while not worker.is_cancelled:
                seen = observer.look()
                if not worker.is_cancelled:
                    self.call_from_thread(self._show, seen)
                pause.wait(self._every)

    def _show(self, seen: Observation) -> None:
        lake, log = seen.lake, seen.log
        self.query_one("#epoch", Static).update(
            f"version {log.version if log else _UNKNOWN}, epoch {lake.epoch}, term {lake.term}, "
            f"published {seen.at - lake.published_at:.0f} s ago"
            if lake
            else f"version {log.version if log else _UNKNOWN}, no epoch yet"
        )
        self.query_one("#ill", Static).update("\n".join(seen.ill))
        self._fill(
            "processes",
            [
                (
                    p.name,
                    p.pid or _UNKNOWN,
                    p.state,
                    p.restarts,
                    p.memory >> 20,
                    f"{p.cpu_seconds:.1f}",
                )
                for p in seen.processes
            ],
        )
        self._fill("streams", [_stream(source) for source in seen.sources])
        self._fill("lag", _lag_rows(seen))
        self.query_one("#safekeepers", DataTable).display = seen.quorum is not None
        self._fill("safekeepers", _quorum_rows(seen))
        self.query_one("#slots", DataTable).display = seen.slots is not None
        self._fill("slots", _slot_rows(seen))
        self._fill(
            "tables",
            [
                (t.table, t.state, t.rows, _told(t.versions), _told(t.seconds, ".1f"))
                for t in lag.of_tables(seen)
            ],
        )

    def _fill(self, name: str, rows: Sequence[tuple[object, ...]]) -> None:
        table = self.query_one(f"#{name}", DataTable)
        table.clear()
        for row in rows:
            table.add_row(*[Text(printable(str(value))) for value in row])


def _stream(source: SourceView) -> tuple[object, ...]:
    told = source.capture
    held = (source.server or {}).get("retained_bytes")
    return (
        source.name,
        source.state,
        *(format_lsn(told.get(f"{name}_lsn", 0)) for name in ("server", "logged", "confirmed")),
        _UNKNOWN if held is None else f"{held / (1 << 20):.1f} MB",
    )


def _lag_rows(seen: Observation) -> list[tuple[object, ...]]:
    by_source: dict[str, list[str]] = {}
    for each in lag.of_sources(seen):
        told = f"{_told(each.bytes)} B"
        if each.versions is not None:
            told += f", {each.versions} v"
        by_source.setdefault(each.source, []).append(f"{told}, {_told(each.seconds, '.1f')} s")
    return [(name, *stages) for name, stages in by_source.items()]


def _quorum_rows(seen: Observation) -> list[tuple[object, ...]]:
    """The quorum, then each safekeeper."""
    if seen.quorum is None:
        return []
    told = seen.quorum.proposer
    state = "follows" if seen.quorum.quorum else "LOST"
    lsns = (told.get("commit_lsn", _UNKNOWN), told.get("end_lsn", _UNKNOWN))
    behind = f"{_told(seen.quorum.lag_bytes)} B"
    rows: list[tuple[object, ...]] = []
    if seen.quorum.proposer_here:
        rows.append(("quorum", state, told.get("term", _UNKNOWN), *lsns, behind))
    for each in seen.quorum.safekeepers:
        term, commit = (each.own.get(name, _UNKNOWN) for name in ("term", "commit_lsn"))
        lag = f"{_told(each.told.get('lag_bytes'))} B"
        rows.append((each.name, each.state, term, commit, each.flush_lsn or _UNKNOWN, lag))
    return rows


def _slot_rows(seen: Observation) -> list[tuple[object, ...]]:
    """Each slot on each candidate."""
    if seen.slots is None:
        return []
    return [
        (
            *(each[name] for name in ("slot", "candidate", "verdict", "reason")),
            f"{_told(each['age'], '.1f')} s",
            f"{_told(each['lag_bytes'])} B",
        )
        for each in seen.slots.rows
    ]


def _told(value: float | None, form: str = "") -> str:
    return _UNKNOWN if value is None else format(value, form)
