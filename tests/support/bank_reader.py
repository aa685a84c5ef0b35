"""A reader of the two banks with a JVM of its own: it reads live and from the lake in turn, until it is killed.

python -m tests.support.bank_reader LAKE LOG SEED FILE

Each read is a line of JSON in FILE: its `kind`, `epoch` and what is wrong (`wrongs`), or the cause of the error that refused it. Nothing is
judged here but the sums: `reads` has the lines, and the test compares them, across readers that follow one another in FILE.
"""

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support import table_format, two_banks
from walsender_bridge.errors import TusklineError

LIVE, LAKE = "live", "lake"


def reads(file: Path) -> list[dict[str, Any]]:
    """The lines that are complete, those of earlier readers first."""
    if not file.exists():
        return []
    lines = file.read_text().splitlines(keepends=True)
    # One that was killed in the middle of a line leaves a part of it.
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def _observed(spark: Any, lake: str, log: str, kind: str) -> dict[str, Any]:
    """One read, and what is wrong with it."""
    from spark_consumers import read

    try:
        found = read(spark, lake, live=kind == LIVE, log=log if kind == LIVE else None)
        absent = {f"{bank}.public.{name}" for bank in two_banks.BANKS for name in two_banks.NAMES}
        absent -= {*found.tables}
        if absent:
            return {"epoch": found.epoch, "wrongs": [f"left out: {sorted(absent)}: {found.stale}"]}
        figures = two_banks.figures_of(found)
    except TusklineError as error:
        return {"error": error.cause.name, "what": str(error)[:500]}
    wrongs = [each for bank in two_banks.BANKS for each in two_banks.wrongs(bank, figures[bank])]
    return {"epoch": found.epoch, "wrongs": wrongs}


def _kinds(seed: int) -> Iterator[str]:
    """Live and lake at random, so that each follows each."""
    draw = random.Random(seed)
    while True:
        yield draw.choice([LIVE, LIVE, LAKE])


def main(lake: str, log: str, seed: str, file: str) -> None:
    """Read until killed."""
    from spark_consumers.spark.session import session

    spark = session(
        "bank", lake=lake, conf={"spark.driver.memory": "600m", "spark.log.level": "OFF"}
    )
    with open(file, "a") as output:
        for kind in _kinds(int(seed)):
            line = {
                "pid": os.getpid(),
                "began": time.time(),
                "kind": kind,
                **_observed(spark, lake, log, kind),
                "ended": time.time(),
            }
            print(json.dumps(line), file=output, flush=True)
            if "error" in line:
                time.sleep(0.2)


if __name__ == "__main__":
    table_format.use_in_this_process()
    main(*sys.argv[1:])
