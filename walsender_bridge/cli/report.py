"""`tuskline report`: what the installation does for some time, as one HTML page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from walsender_bridge.cli.options import DEFAULT_CONFIG, AsJson, ConfigPath, load_config
from walsender_bridge.errors import TusklineError, UsageError
from walsender_bridge.runtime.output import Output

if TYPE_CHECKING:
    from walsender_bridge.config import Config
    from walsender_bridge.report.recording import EpochMark, Sample

#: More samples than this are no better seen, and cost memory.
_MOST_SAMPLES = 20_000


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("report")(report)


def report_file(path: Path) -> Path:
    """The absolute path of a report that is to be written. Raises `UsageError` if its folder does not exist, or it is a folder itself."""
    found = path.absolute()
    if found.is_dir() or not found.parent.is_dir():
        raise UsageError(
            "the report needs a file name in a folder that exists",
            where=str(found),
            repair="create the folder, or choose another name",
        )
    return found


def report(
    file: Annotated[Path, typer.Argument(metavar="FILE.html", help="File to write.")],
    config: ConfigPath = DEFAULT_CONFIG,
    seconds: Annotated[float, typer.Option(help="Seconds to observe.", min=1)] = 60.0,
    every: Annotated[float, typer.Option(help="Seconds between observations.", min=0.2)] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Observe this machine's parts, and write a page of charts.

    The charts show freshness, lag, epochs, processes and problems.
    """
    from walsender_bridge.report import recording
    from walsender_bridge.report.page import page
    from walsender_bridge.report.recorder import Recorder
    from walsender_bridge.runtime.durable import replace_file

    path, settings = report_file(file), load_config(config)
    if seconds / every > _MOST_SAMPLES:
        raise UsageError(
            f"that is more than {_MOST_SAMPLES} observations", repair="use a larger --every"
        )
    output = Output(as_json=as_json)
    output.note(f"observing for {seconds:g} s")
    with Recorder(settings, every) as recorder:
        recorder.wait(seconds)
    samples = recorder.samples
    epochs = _epochs(settings, samples)
    made = recording.Recording("tuskline report", every, samples, epochs)
    replace_file(path, page(made).encode())
    output.record(
        {
            "file": str(path),
            "seconds": round(made.end - made.begin, 1),
            "samples": len(samples),
            "epochs": len(epochs),
            "problems": len(recording.problem_spans(samples)),
        }
    )


def _epochs(settings: "Config", samples: "list[Sample]") -> "list[EpochMark]":
    """The epochs that were published meanwhile; none without a lake here, or if it cannot be read, which the samples tell."""
    from walsender_bridge.observability.lake_chain import lake_chain
    from walsender_bridge.report.recording import epochs

    if settings.lake is None or "lake" not in settings.parts:
        return []
    try:
        return epochs(lake_chain(settings.lake).newest_first(), samples[0].at)
    except (TusklineError, OSError):
        return []
