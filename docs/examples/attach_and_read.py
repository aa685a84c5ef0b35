"""Attach Tuskline to a PostgreSQL server, and read all tables at one epoch.

    python attach_and_read.py tuskline.toml

`tuskline.toml` is the configuration of README.md. The program needs the extras `log-server` and `spark`, and Java 17 to 22.
Tuskline runs on when the program has ended: `tuskline down` stops it, and `tuskline detach` removes from the server all
that `tuskline init` created there.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

from tuskline import read, session


def main(config: str) -> None:
    """Attach, wait until the tables are in the lake, and print them."""
    # Creates the publication, the slot, and one table in a schema of its own. If the role of the DSN may not, add
    # "--admin", "user=postgres".
    tuskline("init", config)
    # Starts the change log, capture, and the Spark job, which copies each table once and then follows it.
    tuskline("up", config, "--background")
    # Returns when all that was committed before is readable, in every table.
    tuskline("flush", config)

    lake = Path(config).parent / tomllib.loads(Path(config).read_text())["lake"]["uri"]
    spark = session("attach_and_read", lake=lake)
    # One epoch for all tables: a transaction is in all of them or in none.
    snapshot = read(spark, lake)
    for name in snapshot:
        print(name, snapshot[name].count(), sep="\t")
    orders = snapshot["public.orders"]
    for status, count in orders.groupBy("status").count().orderBy("status").collect():
        print(status, count, sep="\t")
    spark.stop()


def tuskline(command: str, config: str, *options: str) -> None:
    """Run a command. Its error, with the HINT, is on standard error."""
    subprocess.run(["tuskline", command, "--config", config, *options], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
