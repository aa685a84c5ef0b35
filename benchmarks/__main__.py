"""`python -m benchmarks NAME [--json] [--rounds 5] [--scale 0.01]`; progress goes to standard error.

Without `--json` a table of figures; with it the last line of standard output is one JSON object: `name`,
`rounds`, `results_equal`, `peers`, `ratios` (own / peer), `absolute` (medians), `machine`, `raw`. The exit
code is 1 if the results of the sides differ: then there are no ratios.
"""

import argparse
import importlib
import json
import sys
from typing import Any

from benchmarks.report import keep

NAMES = (
    "apply",
    "capture",
    "comparison",
    "decode",
    "freshness",
    "log-recovery",
    "memory",
    "snapshot",
    "slot-scan",
    "tables",
    "throttle",
    "views",
    "wal",
    "wal-catchup",
)


def main(arguments: list[str]) -> int:
    """Run one benchmark; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = parser.add_subparsers(dest="name", required=True)
    modules = {
        name: importlib.import_module(f"benchmarks.{name.replace('-', '_')}") for name in NAMES
    }
    for name, module in modules.items():
        own = names.add_parser(name, help=str(module.__doc__).split("\n", 1)[0])
        own.add_argument("--json", action="store_true")
        own.add_argument("--rounds", type=int, default=5)
        own.add_argument(
            "--scale", type=float, default=1.0, help="of the work; 0.01 for a quick run"
        )
        module.add_options(own)
    given = parser.parse_args(arguments)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    record = modules[given.name].run(given, say).record()
    say(f"kept in {keep(record)}")
    if given.json:
        print(json.dumps(record))
    else:
        _table(record)
    return 0 if record["results_equal"] else 1


def _table(record: dict[str, Any]) -> None:
    for peer in record["peers"]:
        print(f"peer: {peer['name']} {peer['version']}")
    for name, figure in (record["absolute"] | record["ratios"]).items():
        print(f"{name:45} {figure:>14,.3f}")
    for difference in record["unequal"]:
        print(f"NOT EQUAL, so no ratios: {difference}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
