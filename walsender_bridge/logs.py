"""How every part writes its log: lines for people, or one JSON object a line; to standard error.

The form comes from `TUSKLINE_LOGS__FORMAT` (`console` or `json`), which is where `[logs] format` is handed on
to the processes that are started from here. Fields have the names of the field: `lsn`, `term`, `slot`,
`epoch`, `source`, `table`. Spark's own lines are those of its log4j.
"""

import os
import sys
from typing import Final

import structlog

from walsender_bridge.errors import TusklineError
from walsender_bridge.printable import printable

VARIABLE: Final = "TUSKLINE_LOGS__FORMAT"


def hand_on(form: str) -> None:
    """Make this the form here and in every process that is started from here."""
    os.environ[VARIABLE] = form
    configure()


def configure() -> None:
    """Set this process up, as the environment says."""
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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def say_error(error: TusklineError) -> None:
    """A part's last word: the error that ends it."""
    if os.environ.get(VARIABLE) == "json":
        structlog.get_logger().error("ended", **error.to_wire())
    else:
        sys.stderr.write(printable(f"{error}\n", lines=True))


def _printable_names(
    _logger: object, _method: str, event: structlog.types.EventDict
) -> structlog.types.EventDict:
    """A name or a server's message is data: no terminal obeys it. A traceback keeps its lines."""
    return {
        key: printable(value, lines=key == "exception") if isinstance(value, str) else value
        for key, value in event.items()
    }
