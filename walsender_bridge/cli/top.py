"""`tuskline top`: a live view that shows one observation (`observation`) per second, and queries nothing else."""

from threading import Event
from typing import ClassVar, Final

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.events import Resize
from textual.widgets import Footer, Static
from textual.worker import get_current_worker

from walsender_bridge.cli.top_view import screen
from walsender_bridge.config import Config
from walsender_bridge.observability.observation import Observation, Observer

#: Seconds between two observations.
EVERY: Final = 1.0


class Top(App[None]):
    """The view. `q` ends it."""

    TITLE = "tuskline"
    BINDINGS: ClassVar[list[BindingType]] = [("q", "quit", "Quit")]

    def __init__(self, settings: Config, *, every: float = EVERY) -> None:
        super().__init__()
        self._settings = settings
        self._every = every
        self._seen: Observation | None = None

    def compose(self) -> ComposeResult:
        """The observation, and the keys."""
        yield Static("waiting for the first observation", id="seen")
        yield Footer()

    def on_mount(self) -> None:
        """Start to observe."""
        self._watch()

    def on_resize(self, _: Resize) -> None:
        """Show the last observation again."""
        if self._seen is not None:
            self._show(self._seen)

    @work(thread=True, exclusive=True)
    def _watch(self) -> None:
        """Observe from a thread: a server that hangs must not block the view."""
        worker, pause = get_current_worker(), Event()
        with Observer(self._settings) as observer:
            while not worker.is_cancelled:
                seen = observer.observe()
                if not worker.is_cancelled:
                    self.call_from_thread(self._show, seen)
                pause.wait(self._every)

    def _show(self, seen: Observation) -> None:
        self._seen = seen
        # The last line of the screen is the footer's.
        lines = screen(seen, self.size.width, max(1, self.size.height - 1))
        text = Text("\n").join(Text(line.text, line.style) for line in lines)
        self.query_one("#seen", Static).update(text)
