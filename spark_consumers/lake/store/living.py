"""Which of the records that processes hold are those of living ones.

Where the store has locks, a record whose lock is free belongs to a dead process. Elsewhere each process changes its record
all the time (it *beats*), and one that has not changed for `DEAD_AFTER` seconds belongs to a dead process. Those seconds
are counted by the clock of the process that looks, from its own first sight of the content; no two clocks are compared, and
a process that has just begun to look takes every record for a living one's.

A holder relies on this: as long as fewer than `DEAD_AFTER` seconds have passed since it began its last successful beat,
nobody has removed its record. Later it must hold another one, under a new name (`LAPSE`): a removal of the old one may have
been decided already.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from spark_consumers.lake.store.lake_store import FoundRecord, LakeStore

#: Seconds without a beat after which a process counts as dead.
DEAD_AFTER = 600.0
#: Seconds after which a holder no longer relies on its record: half, since two clocks may run at different rates.
LAPSE = DEAD_AFTER / 2
#: Seconds of silence after which a free lock is believed whose holder is known to be seen: less than none.
AT_ONCE = -1.0


@dataclass
class Silence:
    """For how long each record has not changed, by its name. Pure: the caller brings contents and times."""

    _seen: dict[str, tuple[bytes, float]] = field(default_factory=dict)

    def of(self, contents: Mapping[str, bytes], now: float) -> dict[str, float]:
        """Seconds since these contents were seen first. `now` must be from before they were read."""
        seen = {}
        for name, content in contents.items():
            before = self._seen.get(name)
            seen[name] = before if before and before[0] == content else (content, now)
        self._seen = seen
        return {name: now - since for name, (_, since) in seen.items()}


class Living:
    """The records in one folder of a lake, as one process sees them. `clock` counts seconds.

    `believed_after`: processes change their records also where there are locks. Then a free lock is believed if the record has
    not changed for more than so many seconds: a lock of another machine may be invisible. `AT_ONCE`: it is believed at first sight.
    """

    def __init__(
        self,
        store: LakeStore,
        folder: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        believed_after: Callable[[FoundRecord], float],
    ) -> None:
        self._believed_after = believed_after
        self._store = store
        self._folder = folder
        self._clock = clock
        self._silence = Silence()

    def records(self) -> list[FoundRecord]:
        """The records of living processes, by what is known; those of dead ones are removed."""
        now = self._clock()
        found = {record.name: record for record in self._store.held(self._folder)}
        silent = self._silence.of({n: record.content for n, record in found.items()}, now)
        for name in list(found):
            beats_no_more = not self._store.has_locks and silent[name] >= DEAD_AFTER
            is_dead = found[name].is_dead and silent[name] > self._believed_after(found[name])
            if is_dead or beats_no_more:
                self._store.remove(f"{self._folder}/{name}")
                del found[name]
        return list(found.values())
