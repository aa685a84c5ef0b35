"""The logging of all parts: text lines or one JSON object per line, to standard error.

The format comes from `TUSKLINE_LOGS__FORMAT` (`console` or `json`), which passes `[logs] format` on
to child processes. Fields are named `lsn`, `term`, `slot`,
`epoch`, `source`, `table`. Spark's own lines come from its log4j.

Invariant: if the log cannot be written (its disk is full), only its lines are lost: no part ends because of it, and no
exit code changes.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
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
    """Mark this process as a long-running part, whose final error is a line of its log (`say_error`)."""
    _part.set(True)


def is_part() -> bool:
    """Whether this process is a long-running part."""
    return _part.get()


def export_format(form: str) -> None:
    """Set the format of this process and of all its child processes."""
    os.environ[VARIABLE] = form
    configure()


def configure() -> None:
    """Configure logging from the environment."""
    with _without_rich():
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


def logger() -> "FilteringBoundLogger":
    """`structlog.get_logger`, which imports the library with the first line: commands that log nothing do not pay for it."""
    return cast("FilteringBoundLogger", _Logger())


class _Logger:
    def __getattr__(self, method: str) -> Any:
        import structlog

        return getattr(structlog.get_logger(), method)


@contextlib.contextmanager
def _without_rich() -> Iterator[None]:
    """Import structlog without rich, whose tracebacks are not used here: a fifth of a safekeeper's start."""
    hidden: dict[str, Any] = {} if "rich" in sys.modules else {"rich": None}
    sys.modules.update(hidden)
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def say_error(error: TusklineError) -> None:
    """Log or print the error that ends the process."""
    if os.environ.get(VARIABLE) == "json":
        import structlog

        structlog.get_logger().error("ended", **error.to_wire())
    else:
        say(printable(f"error: {error}\n", lines=True))


def _printable_names(
    _logger: object, _method: str, event: "structlog.types.EventDict"
) -> "structlog.types.EventDict":
    """Escape control characters in names and server messages; a traceback keeps its line breaks."""
    return {
        key: printable(value, lines=key == "exception") if isinstance(value, str) else value
        for key, value in event.items()
    }


def say(text: str) -> None:
    """Write to standard error; failure to write is not an error."""
    _StandardError().write(text)


class _StandardError:
    """The current standard error, unbuffered.

    Data that cannot be written must not remain in a buffer: Python flushes it at exit, and on failure sets an exit code
    of its own, after which a supervisor would restart a process that must not be restarted.
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
        """Do nothing, since nothing is buffered."""
