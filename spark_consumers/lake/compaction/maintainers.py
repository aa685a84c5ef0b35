"""Who maintains a lake: `<lake>/_tuskline/maintainers/<name>`, a record that each maintainer holds and changes while it lives.

Of several, one works, and the others stand by. Nothing depends on that but the work that two would do twice. A maintainer
that is suspended does not beat, and counts for nothing after `SILENT` seconds, by the clock of who looks.
"""

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable

from spark_consumers.lake.store.lake_store import STATE, HeldRecord, LakeStore
from spark_consumers.lake.store.living import LAPSE, Living, Silence
from walsender_bridge.errors import TusklineError

#: The folder of the records.
MAINTAINERS = f"{STATE}/maintainers"
#: Seconds between two beats.
_BEAT = 5.0
#: Seconds without a beat after which a maintainer does not work.
SILENT = 30.0
#: The same where its lock is free, but may be one that is invisible from here: a few beats. Then its record is removed.
UNLOCKED_SILENT = 15.0
_SIZE = 64


class Maintainers:
    """The maintainers of a lake, as one process sees them."""

    def __init__(self, store: LakeStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._living = Living(store, MAINTAINERS, clock, believed_after=lambda _: UNLOCKED_SILENT)
        self._silence = Silence()
        self._clock = clock

    def living(self) -> set[str]:
        """The names of those whose processes live, as far as is known; records of dead ones are removed."""
        return {record.name for record in self._living.records()}

    def working(self) -> set[str]:
        """The names of those that have given a sign of life lately. One that is seen for the first time has."""
        now = self._clock()
        found = {record.name: record.content for record in self._living.records()}
        return {name for name, silent in self._silence.of(found, now).items() if silent < SILENT}


class MaintainerSign:
    """This process's own record. Raises `OSError` or `TusklineError` where it cannot be made."""

    def __init__(self, store: LakeStore, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = uuid.uuid4().hex[:12]
        self._clock = clock
        self._beats = 0
        self._locked = store.has_locks
        self._beaten_at = clock()
        self._record: HeldRecord = store.hold(
            f"{MAINTAINERS}/{self.name}", self._content(), locked=True
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sign of life", daemon=True)
        self._thread.start()

    def is_lost(self) -> bool:
        """Whether others may take this maintainer for dead, and remove the files of its offers."""
        late = not self._locked and self._clock() - self._beaten_at > LAPSE
        return late or self._record.is_lost()

    def close(self) -> None:
        """Take the record away."""
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(TusklineError):
            self._record.close()

    def _run(self) -> None:
        while not self._stop.wait(_BEAT):
            began = self._clock()
            with contextlib.suppress(OSError, TusklineError):
                self._record.write(self._content())
                self._beaten_at = began

    def _content(self) -> bytes:
        self._beats += 1
        return f"{os.getpid()} {self._beats}".ljust(_SIZE).encode()
