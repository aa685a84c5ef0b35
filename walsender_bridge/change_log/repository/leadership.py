"""Who of several repositories leads, and why no other one can write or answer. Pure.

The *leader's key* in etcd is bound to a lease with a time to live (TTL). A repository leads from the transaction that creates
the key while there is none, and that key's creation revision is its *fence*: etcd gives each revision once.

**Writes.** Whatever is written is one transaction of etcd that compares the creation revision of the leader's key with the
writer's fence (`fenced`). etcd orders all transactions. Once the key is gone, or somebody else has created it, that comparison
fails forever, since no later key has that revision. So:

- W1. No write of an old leader takes effect behind the creation of a newer leader's key, however late it arrives, and whatever
  any clock shows. A leader reads the records after it has created its key, so it has every write that will ever take effect
  before its own.
- W2. A record also compares that its number is free, and what belongs to a checkpoint that the checkpoint is still the one
  that the writer knows. So an attempt whose answer was lost takes effect once or not at all, may be sent again, and never
  replaces what was written later. If the number is taken, by the same bytes, under the same fence, then by the first attempt.

**Answers.** They come from the leader's memory, which contains only what is durable, so an answer is right as long as nobody
else leads. The leader renews by a new lease, and a write that binds its key to it. Both are decided by a majority of etcd, and
the write is fenced as all others, and compares that the key is as the leader knows it (so a late one binds nothing to an older
lease). etcd's own renewal is not used: a member of etcd that does not know yet that it has been replaced confirms it alone, and
may end leases that others have renewed; it knows no lease that was granted after it fell behind. etcd removes the key no sooner
than a TTL after it granted the lease, which it did after the leader asked for it. Therefore:

- A1. Until `until`, which is the moment at which the last renewal that was confirmed was *asked for*, plus the TTL less `_DRIFT`,
  nobody else leads. The moment is taken from the leader's own clock, which counts time asleep as well. `_DRIFT` allows for
  clocks that run at different rates. A new leader of etcd prolongs the leases that it knows; it never shortens one.
- A2. The clock is looked at *after* an answer has been formed. A process that is stopped before that finds itself too late. If it
  is stopped after that, the answer was right at a moment between the question and its arrival, like one that the network delays.
- A3. Nothing is trimmed unless the clock has been looked at after the limit was computed: the limit depends on leases of
  consumers, which only a newer leader could have renewed.

**Giving way.** A leader may reach etcd, but not what it needs for its work. It then records in its key that it is *hindered*. A
candidate that does reach it asks for the lead by a second key, the *successor's*, which is bound to a lease as well. The leader
sees that key when it renews its own, and resigns if it is still hindered. So nobody leads before it has ended, and W1 to A3 are not
affected. While there is a successor, no other candidate creates the leader's key. Without one, a hindered leader goes on.

A virtual machine whose clock stands still while it is paused violates A1 until the next renewal, but neither W1 nor W2: it
could answer a question with an old state, and cannot issue a version, a term or a lease.

**Calls to log servers.** What an old leader may still send was decided while it led, and recorded before it was sent: commits,
which remain true, seals, whose terms a newer seal exceeds, and synchronizations, which a replica in sync refuses. They are the
late messages of a repository that was restarted (`tests/simulation/test_replicated_log.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Final

#: The part of a TTL by which the clocks of two machines may differ when they measure it.
_DRIFT: Final = 0.1
#: Renewals in the time of a TTL, so that one or two may fail.
_RENEWALS: Final = 4


@dataclass(frozen=True, slots=True)
class Leadership:
    """A repository leads with this fence (see the module); `ttl` in seconds, `until` by its own clock."""

    fence: int
    ttl: float
    until: float

    def renewed(self, sent_at: float, ttl: float) -> "Leadership":
        """After the confirmed renewal that was asked for at that time."""
        return replace(self, ttl=ttl, until=max(self.until, valid_until(sent_at, ttl)))

    def may_answer(self, now: float) -> bool:
        """Whether nobody else can lead at this time."""
        return now < self.until

    @property
    def pause(self) -> float:
        """Seconds between two renewals."""
        return self.ttl / _RENEWALS


def valid_until(sent_at: float, ttl: float) -> float:
    """Until when a lease certainly lasts that was granted by a request sent at that time."""
    return sent_at + ttl * (1 - _DRIFT)


class Written(Enum):
    """The outcome of a record's transaction."""

    YES = auto()
    #: Another repository leads, or may lead.
    FENCED = auto()
    #: An earlier record, whose outcome was not known, has this number: the records have to be read again.
    TAKEN = auto()


def judge(fence: int, leader_fence: int | None, stored: bytes | None, own: bytes) -> Written:
    """What the failure of a record's transaction means, from what it found: the leader's key, and the record of that number."""
    if leader_fence != fence:
        return Written.FENCED
    return Written.YES if stored == own else Written.TAKEN


def created(key: str, revision: int) -> dict[str, Any]:
    """The comparison that a key has this creation revision; 0: that there is none."""
    return {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": str(revision)}


def unchanged(key: str, revision: int) -> dict[str, Any]:
    """The comparison that a key was last written at this revision; 0: never."""
    return {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}


def fenced(
    leader_key: str, fence: int, *others: dict[str, Any], then: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """A transaction of the leader with this fence: `then`, if all comparisons hold; else nothing is written."""
    return {"compare": [created(leader_key, fence), *others], "success": [*then]}
