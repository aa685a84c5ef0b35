"""How every part writes its log: lines for people, or one JSON object a line; to standard error.

The form comes from `TUSKLINE_LOGS__FORMAT` (`console` or `json`), which is where `[logs] format` is handed on
to the processes that are started from here. Fields have the names of the field: `lsn`, `term`, `slot`,
`epoch`, `source`, `table`. Spark's own lines are those of its log4j.

Invariant: a log that cannot be written (its disk is full) costs its lines and nothing else: no part ends by it, and none
ends with another exit code.
"""

import contextlib
import os
import sys
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, cast

from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime.printable import printable

if TYPE_CHECKING:
    import structlog
    from structlog.typing import FilteringBoundLogger

VARIABLE: Final = "TUSKLINE_LOGS__FORMAT"

_part: ContextVar[bool] = ContextVar("part", default=False)


def begin_part() -> None:
    """This process is a part that runs, and no command that answers: its last word is a line of its log (`say_error`)."""
    _part.set(True)


def is_part() -> bool:
    """Whether it is."""
    return _part.get()


def export_format(form: str) -> None:
    """Make this the form here and in every process that is started from here."""
    os.environ[VARIABLE] = form
    configure()


def configure() -> None:
    """Set this process up, as the environment says."""
    import structlog

    json = os.environ.get(VARIABLE) == "json"
    renderer: structlog.types.Processor = (
        structlog.processors.JSONRenderer()
        if json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    names = [] if json else [_printable_names]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            *names,
            renderer,
        ],
        logger_factory=structlog.WriteLoggerFactory(_StandardError()),  # type: ignore[arg-type]  # no more is used
    )


def logger(name: str) -> "FilteringBoundLogger":
    """`structlog.get_logger`, whose library is imported with the first line: commands that write none do without it."""
    return cast("FilteringBoundLogger", _Logger(name))


class _Logger:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        import structlog

        return getattr(structlog.get_logger(self._name), method)


def say_error(error: TusklineError) -> None:
    """A part's last word: the error that ends it."""
    if os.environ.get(VARIABLE) == "json":
        import structlog

        structlog.get_logger().error("ended", **error.to_wire())
    else:
        say(printable(f"error: {error}\n", lines=True))


def _printable_names(
    _logger: object, _method: str, event: "structlog.types.EventDict"
) -> "structlog.types.EventDict":
    """A name or a server's message is data: no terminal obeys it. A traceback keeps its lines."""
    return {
        key: printable(value, lines=key == "exception") if isinstance(value, str) else value
        for key, value in event.items()
    }


def say(text: str) -> None:
    """Write to standard error; a disk that takes nothing is no error."""
    _StandardError().write(text)


class _StandardError:
    """Standard error as it is at that moment, past its buffer.

    What cannot be written may not stay in the buffer either: Python flushes it at the exit, and answers a failure
    with an exit code of its own, by which a supervisor would start again what must not come back.
    """

    def write(self, text: str) -> None:
        file = sys.stderr
        raw = getattr(getattr(file, "buffer", None), "raw", None)
        with contextlib.suppress(OSError):
            if raw is None:
                file.write(text)
                return
            data = memoryview(text.encode(errors="backslashreplace"))
            while data:
                data = data[raw.write(data) or len(data) :]

    def flush(self) -> None:
        """Nothing waits."""
