"""The metadata repository in etcd: a log of records and a checkpoint, written by the leader alone.

Keys, below the prefix (numbers have 20 digits, so that their order is that of the keys):

| key | value |
|---|---|
| `format` | the version of this format |
| `leader` | see `leadership.py`, which says why the writes below are safe |
| `record/NUMBER` | a record |
| `checkpoint` | the number of the last record in it, the state without its commits, and which commits each stream has |
| `commits/STREAM/VERSION/NUMBER` | commits of a stream from that version on, as of that record |

As in SQLite, a checkpoint writes only the commits that are new, as there may be a million. Its commits are written before it,
and those that nobody needs any more are removed after it. So a reader ignores commits outside the ranges that the checkpoint names.
An attempt that failed may leave some of the same commits behind, under another number: it replaces none.
Each value begins with the checksum of its key and the rest.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

from walsender_bridge.change_log.repository import etcd
from walsender_bridge.change_log.repository.core import Repository, record_from_json
from walsender_bridge.change_log.repository.etcd import Etcd, EtcdSettings, KeyValue
from walsender_bridge.change_log.repository.leader_lease import Leader, not_leading
from walsender_bridge.change_log.repository.leadership import (
    Written,
    created,
    fenced,
    judge,
    unchanged,
)
from walsender_bridge.change_log.repository.record_store import (
    CHECKPOINT_EVERY,
    FoldedStore,
    crc,
    split_histories,
)
from walsender_bridge.errors import (
    CorruptError,
    NotSupportedError,
    TusklineError,
    UnavailableError,
)

_T = TypeVar("_T")

FORMAT: Final = "1"
#: Seconds for a member of etcd to answer, and for any of them.
_ATTEMPT, _WITHIN = 1.0, 4.0
#: Operations of a transaction: etcd takes 128 by default.
_MOST_OPERATIONS: Final = 100
#: Commits in a value, of some 200 bytes each: etcd takes requests of 1.5 MiB by default.
_MOST_COMMITS: Final = 2000
_REPAIR: Final = "stop all repositories, remove all keys with that prefix, and run `tuskline log rebuild`: docs/log-lost.md"


class EtcdStore(FoldedStore):
    """See the module. One thread at a time; `leader` is the one of this process, and is not ended by `close`.

    Everything raises `NotLeaderError` once another repository may lead, and `UnavailableError` while etcd does not answer.
    """

    def __init__(
        self, settings: EtcdSettings, leader: Leader, *, checkpoint_every: int = CHECKPOINT_EVERY
    ) -> None:
        self._etcd = Etcd(settings, _ATTEMPT)
        super().__init__(f"{self._etcd.where}, prefix {settings.prefix}", checkpoint_every)
        self._prefix = settings.prefix
        self._leader = leader
        #: The revision at which the checkpoint was written; 0: there is none.
        self._checkpoint_revision = 0
        #: By stream: the versions at which its stored commits begin, and the last version of them.
        self._begins: dict[str, list[int]] = {}
        self._kept: dict[str, int] = {}
        try:
            self._open()
            self._state = self._load()
        except BaseException:
            self.close()
            raise

    @property
    def state(self) -> Repository:
        """The state after all stored records, if this repository leads."""
        self._leader.check()
        return super().state

    def confirm(self) -> None:
        """See `RecordStore`."""
        self._leader.check()

    def close(self) -> None:
        """Close the connection."""
        self._etcd.close()

    # -- reading ------------------------------------------------------------------------------------

    def _open(self) -> None:
        key = self._key("format")
        found = self._etcd.get(key, within=_WITHIN)
        if found is None:
            self._write([etcd.put(key, FORMAT.encode())], created(key, 0))
        elif found.value != FORMAT.encode():
            raise NotSupportedError(
                f"unknown format {found.value!r:.20} of the repository (this version supports {FORMAT})",
                where=self._where,
                repair="use the version of Tuskline that wrote it, or a newer one",
            )

    def _load(self) -> Repository:
        self._state = None
        try:
            return self._read()
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptError(
                f"could not read the repository: {error}", where=self._where, repair=_REPAIR
            ) from error

    def _read(self) -> Repository:
        state, self._checkpointed, self._checkpoint_revision = Repository(), 0, 0
        self._begins, self._kept = {}, {}
        found = self._etcd.get(self._key("checkpoint"), within=_WITHIN)
        if found is not None:
            self._checkpoint_revision = found.changed
            stored = json.loads(self._checked(found))
            self._checkpointed, record = stored["number"], stored["state"]
            self._read_commits(record["streams"], stored["commits"])
            state = Repository.from_record(record)
        self._number = self._checkpointed
        for each in self._etcd.scan(self._key("record/"), within=_WITHIN):
            number = int(each.key.rpartition("/")[2])
            if number <= self._checkpointed:
                continue
            if number != self._number + 1:
                raise ValueError(f"record {self._number + 1} is missing")
            state.apply(record_from_json(self._checked(each)))
            self._number = number
        return state

    def _read_commits(self, streams: dict[str, Any], ranges: dict[str, Any]) -> None:
        """Complete the streams of a checkpoint by their commits."""
        stored: defaultdict[str, dict[int, Any]] = defaultdict(dict)
        begins: defaultdict[str, list[int]] = defaultdict(list)
        for each in self._etcd.scan(self._key("commits/"), within=_WITHIN):
            _, name, version, _ = each.key.removeprefix(self._prefix).split("/")
            first, last, _ = ranges.get(name, (0, -1, 0))
            if int(version) > last:
                continue
            if int(version) not in begins[name][-1:]:
                begins[name].append(int(version))
            for row in json.loads(self._checked(each)):
                if first <= row[0][0] <= last:
                    stored[name][row[0][0]] = row
        for name, (_, last, count) in ranges.items():
            if len(stored[name]) != count:
                raise ValueError(
                    f"{count} commits of stream {name} were stored, and {len(stored[name])} found"
                )
            streams[name]["history"] = [row for _, row in sorted(stored[name].items())]
            self._kept[name] = last
        self._begins = dict(begins)

    # -- writing ------------------------------------------------------------------------------------

    def _keep(self, number: int, body: str) -> None:
        name = f"record/{number:020}"
        key, value = self._key(name), _with_crc(name, body)
        answer = self._write([etcd.put(key, value)], created(key, 0), reading=key)
        if answer.get("succeeded"):
            return
        leads, there = (
            next(etcd.key_values(each["response_range"]), None) for each in answer["responses"]
        )
        its_fence = None if leads is None else leads.created
        stored = None if there is None else there.value
        match judge(self._leader.fence, its_fence, stored, value):
            case Written.FENCED:
                self._leader.lost.set()
                raise not_leading()
            case Written.TAKEN:
                raise UnavailableError(
                    "an earlier record was written late", where=self._where, repair="try again"
                )

    def _write(
        self, operations: list[dict[str, Any]], *compared: dict[str, Any], reading: str = ""
    ) -> dict[str, Any]:
        """Perform the operations, unless a comparison fails: then the answer has the leader's key and the key `reading`."""
        self._leader.check()
        txn = fenced(self._leader.key, self._leader.fence, *compared, then=operations)
        txn["failure"] = [etcd.get(self._leader.key), etcd.get(reading or self._leader.key)]
        return self._etcd.txn(txn, within=_WITHIN)

    def _is_storage_error(self, error: Exception) -> bool:
        return isinstance(error, TusklineError)

    def checkpoint(self) -> None:
        """Write the state, and remove the records before it."""
        record, histories = split_histories(self.state)
        ranges = {name: (h[0][0][0], h[-1][0][0], len(h)) for name, h in histories.items()}
        begins = {name: list(self._begins.get(name, ())) for name in histories}
        known = unchanged(self._key("checkpoint"), self._checkpoint_revision)
        for name, history in histories.items():
            rows = [row for row in history if row[0][0] > self._kept.get(name, -1)]
            for each in _parts(rows, _MOST_COMMITS):
                begins[name].append(each[0][0][0])
                place = f"{begins[name][-1]:020}/{self._number:020}"
                self._put(f"commits/{name}/{place}", each, known)
        stored = {"number": self._number, "state": record, "commits": ranges}
        before = (self._key(f"record/{number:020}") for number in (0, self._number + 1))
        self._checkpoint_revision = self._put(
            "checkpoint", stored, known, and_then=[etcd.delete(*before)]
        )
        self._checkpointed, self._begins = self._number, begins
        self._kept = {name: last for name, (_, last, _) in ranges.items()}
        for operations in _parts([*self._removals(ranges)], _MOST_OPERATIONS):
            self._write(operations)

    def _put(
        self,
        name: str,
        value: object,
        known: dict[str, Any],
        and_then: Sequence[dict[str, Any]] = (),
    ) -> int:
        """Write a part of a checkpoint, and return the revision. Raises `UnavailableError` if another one is stored meanwhile."""
        operation = etcd.put(self._key(name), _with_crc(name, json.dumps(value)))
        answer = self._write([operation, *and_then], known)
        if not answer.get("succeeded"):
            # An earlier attempt, whose answer was lost, or another repository's: it is read at the next use.
            self._state = None
            raise UnavailableError("there is another checkpoint", where=self._where)
        return int(answer["header"]["revision"])

    def _removals(self, ranges: dict[str, tuple[int, int, int]]) -> Iterator[dict[str, Any]]:
        """The operations that remove the commits that no stream has any more."""
        for name, (first, _, _) in ranges.items():
            begins = self._begins[name]
            # A value contains the versions from its own up to that of the next one.
            gone = sum(following <= first for following in begins[1:])
            if gone:
                prefix = self._key(f"commits/{name}/")
                yield etcd.delete(prefix, f"{prefix}{begins[gone]:020}")
                del begins[:gone]

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _checked(self, found: KeyValue) -> str:
        """The body of a stored value. Raises `ValueError` unless it matches its checksum."""
        name = found.key.removeprefix(self._prefix)
        stored, _, body = found.value.decode().partition(" ")
        if stored != str(crc(name, body)):
            raise ValueError(f"{name} does not match its checksum")
        return body


def _with_crc(name: str, body: str) -> bytes:
    return f"{crc(name, body)} {body}".encode()


def _parts(values: list[_T], most: int) -> Iterator[list[_T]]:
    """The values in lists of at most `most`."""
    return (values[begin : begin + most] for begin in range(0, len(values), most))
