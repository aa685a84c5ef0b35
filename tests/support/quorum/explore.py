"""`python -m tests.support.quorum.explore --scope '3 terms' --resume FOLDER --minutes 10`: continue an exploration.

Reports the number of distinct states reached, and whether there are more. An incomplete search is saved in the folder,
and the next call continues it; searches of other versions of the source are ignored.
"""

import argparse
from pathlib import Path

from tests.support.quorum.scopes import SCOPES
from tests.support.quorum.search import Search, resumed
from tests.support.resume import state_of_source


def explore(scope: str, folder: Path, seconds: float) -> Search:
    """Continue the folder's search of this scope, for `seconds`."""
    here = folder / f"{scope.replace(', ', '-').replace(' ', '-')}-{state_of_source()}"
    search = resumed(here) or Search(SCOPES[scope], traced=False)
    if not search.complete:
        search.run(seconds, lambda progress: print(f"{scope}: {progress}", flush=True))
        search.save(here)
    print(f"{scope}: {search.report()}", flush=True)
    return search


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scope", choices=SCOPES, required=True)
    parser.add_argument("--resume", type=Path, default=Path(".cache/explored"))
    parser.add_argument("--minutes", type=float, default=10)
    arguments = parser.parse_args()
    explore(arguments.scope, arguments.resume, arguments.minutes * 60)


if __name__ == "__main__":
    main()
