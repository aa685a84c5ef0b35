"""`tuskline top`: a live view. It shows an observation (`observation`) a second, and asks for nothing else."""

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

#: Seconds between two looks.
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
        """All that is shown, and the keys."""
        yield Static("looking", id="seen")
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        self._watch()

    def on_resize(self, _: Resize) -> None:
        """Show what was seen last."""
        if self._seen is not None:
            self._show(self._seen)

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
        self._seen = seen
        # The last line of the screen is the footer's.
        lines = screen(seen, self.size.width, max(1, self.size.height - 1))
        text = Text("\n").join(Text(line.text, line.style) for line in lines)
        self.query_one("#seen", Static).update(text)
