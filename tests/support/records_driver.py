"""A driver of a lake that has no tables, as a process: the production's records, signs of life and takeover, without Spark.

`python -m tests.support.records_driver '{"url": ..., "endpoint": ..., "own_locks": ...}'` waits while another driver is at work, takes over,
and is at work until a later one has come: then it ends with the exit code of that error. It has nothing to publish. Each line of its
output is what it does: `look`, `waits`, `works TERM`.

`own_locks`: as on a file system whose locks other machines do not see.
"""

import fcntl
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from spark_consumers.lake.manifest import takeover
from spark_consumers.lake.manifest.chain import Chain, Manifest, open_chain
from spark_consumers.lake.store.lake_store import StoreOptions
from spark_consumers.lake.store.local_store import LocalStore
from spark_consumers.lake.writer.presence import Presence
from spark_consumers.lake.writer.standby import Standby
from walsender_bridge.errors import FencedError, TusklineError

_PAUSE = 0.1


def _drive(chain: Chain, presence: Presence, standby: Standby) -> None:
    """Wait, take over, work. Raises `FencedError` once it is overtaken."""
    head: Manifest | None = None
    while True:
        try:
            if head is not None:
                standby.check(head.term)
            elif standby.stands_by():
                _say(f"waits for {standby.waits_for}")
            else:
                standby.confirm()
                head = _take_over(chain, presence, standby)
                _say(f"works {head.term}")
            _say("look")
        except FencedError:
            if head is not None:
                raise
            presence.claim(0)
        except (TusklineError, OSError) as error:
            _say(f"fails {type(error).__name__}")
        time.sleep(max(_PAUSE, chain.store.pause))


def _take_over(chain: Chain, presence: Presence, standby: Standby) -> Manifest:
    def propose(before: Manifest | None, term: int) -> Manifest:
        presence.claim(term)
        own = uuid.uuid4().hex
        if before is None:
            return Manifest("lake", 1, 1, 0, term, time.time(), steady_at=1.0, writer=own)
        return before.next(before.steady_at + 1.0, term=term, writer=own)

    def do(effect: takeover.Effect) -> Any:
        match effect:
            case takeover.ReadPublishedLink():
                return chain.recorded_newest()
            case takeover.ReadUsedTerm():
                return 0
            case takeover.ReadHead():
                return chain.listed_head()
            case takeover.Publish(link, after):
                chain.publish(link, after)
                return None
        raise AssertionError(f"{effect} is of a table")

    return takeover.carry_out(takeover.take_over(propose, None, standby.decided), do).head


@contextmanager
def _own_locks() -> Iterator[None]:
    """No process sees another one's lock, as if each were on a machine of its own."""
    domain = property(lambda _: str(os.getpid()))
    with (
        mock.patch.object(LocalStore, "lock_domain", domain),
        mock.patch.object(fcntl, "flock"),
    ):
        yield


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    """The process."""
    settings = json.loads(sys.argv[1])
    options = StoreOptions(settings.get("endpoint"), "us-east-1", allow_http=True)
    if not settings["url"].startswith("s3:"):
        Path(settings["url"], "_tuskline", "epochs").mkdir(parents=True, exist_ok=True)
    chain = open_chain(settings["url"], options)
    presence = Presence(chain.store)
    with _own_locks() if settings["own_locks"] else nullcontext():
        try:
            _drive(chain, presence, Standby(chain, presence))
        except TusklineError as error:
            print(f"error: {error}", flush=True)
            sys.exit(int(error.cause))
        finally:
            presence.close()


if __name__ == "__main__":
    main()
