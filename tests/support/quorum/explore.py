"""`python -m tests.support.quorum.explore --scope '3 terms' --resume FOLDER --minutes 10`: go on exploring.

Says how many distinct states were reached, and whether there are more. A search that is not complete is left in
the folder, and the next call goes on with it; what was explored of another state of the source is left aside.
"""

import argparse
from pathlib import Path

from tests.support.quorum.scopes import SCOPES
from tests.support.quorum.search import Search, resumed
from tests.support.resume import state_of_source


def explore(scope: str, folder: Path, seconds: float) -> Search:
    """Go on with what the folder has of this scope, for so long."""
    here = folder / f"{scope.replace(', ', '-').replace(' ', '-')}-{state_of_source()}"
    search = resumed(here) or Search(SCOPES[scope], traced=False)
    if not search.complete:
        search.run(seconds, lambda told: print(f"{scope}: {told}", flush=True))
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
