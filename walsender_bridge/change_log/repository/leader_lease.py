"""Becoming the leader of a log's repositories, or the active one of its bridges, and remaining it: leases in etcd.

A thread renews them. What may be concluded is decided in `leadership.py`.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from walsender_bridge.change_log.repository import etcd
from walsender_bridge.change_log.repository.etcd import Etcd, EtcdSettings, KeyValue
from walsender_bridge.change_log.repository.leadership import (
    Leadership,
    created,
    fenced,
    unchanged,
    valid_until,
)
from walsender_bridge.errors import NotLeaderError, TusklineError
from walsender_bridge.runtime import logs

#: Members of etcd that may be asked in the time of a TTL.
_ATTEMPTS: Final = 5

_log = logs.logger()


def now() -> float:
    """The clock that leases are measured with: it also counts the time for which the machine was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class _Lease:
    """A lease, with its TTL as etcd granted it, and when it was asked for."""

    number: int
    ttl: float
    asked_at: float


class Leader:
    """A repository, or a bridge, that leads until `lost` is set. Made by `try_to_lead`; to be ended with `resign`."""

    def __init__(
        self, key: str, address: str, client: Etcd, seconds: float, lease: _Lease, fence: int
    ) -> None:
        self.key = key
        self._address = address
        #: Whether it leads and cannot work (`leadership.py`): it gives way to a candidate that can.
        self.hindered = False
        self._client = client
        self._seconds = seconds
        #: The revision at which the key was last written.
        self._changed = fence
        self._its = Leadership(fence, lease.ttl, valid_until(lease.asked_at, lease.ttl))
        self.lost = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    @property
    def fence(self) -> int:
        """See `leadership.py`."""
        return self._its.fence

    def check(self) -> None:
        """Raise `NotLeaderError` if another repository may lead."""
        if self.lost.is_set() or not self._its.may_answer(now()):
            self.lost.set()
            raise not_leading()

    def _run(self) -> None:
        while not self._stopping.wait(self._its.pause) and not self.lost.is_set():
            try:
                self._renew()
            except TusklineError as error:
                _log.warning("could not renew the leadership", error=error.what)
            if not self._its.may_answer(now()):
                self.lost.set()

    def _renew(self) -> None:
        lease = _grant(self._client, self._seconds, 0.0)
        bound = etcd.put(self.key, _value(self._address, hindered=self.hindered), lease.number)
        then = [bound, etcd.get(successor_key(self.key))]
        renewal = fenced(self.key, self.fence, unchanged(self.key, self._changed), then=then)
        answer = self._client.txn({**renewal, "failure": [etcd.get(self.key)]}, within=0.0)
        if answer.get("succeeded"):
            self._changed = int(answer["header"]["revision"])
            if self._its.may_answer(now()):
                # Assigned as a whole: whoever reads it has one or the other.
                self._its = self._its.renewed(lease.asked_at, lease.ttl)
            self._give_way(_read(answer, 1))
            return
        found = _read(answer)
        if found is None or found.created != self.fence:
            self.lost.set()
        else:
            # By an earlier renewal whose answer was lost; the next one is confirmed again.
            self._changed = found.changed

    def _give_way(self, successor: KeyValue | None) -> None:
        """Resign if this leader is hindered, and another candidate has asked for the lead."""
        if self.hindered and successor is not None:
            to = _address(successor.value)
            if to != self._address:
                _log.warning("gives way to one that is not cut off", key=self.key, to=to)
                self.lost.set()

    def resign(self) -> None:
        """Let another repository lead at once. Only after the last answer."""
        self.lost.set()
        self._stopping.set()
        self._thread.join()
        removal = fenced(self.key, self.fence, then=[etcd.delete(self.key, self.key + "\0")])
        try:
            self._client.txn(removal, within=0.0)
        except TusklineError:
            _log.info("leadership left to expire")
        self._client.close()


def try_to_lead(
    settings: EtcdSettings,
    address: str,
    key: str = "",
    able: Callable[[], bool] = lambda: False,
) -> Leader | str:
    """Lead, if nobody does; else the address of the one that does. Raises `UnavailableError` if etcd does not answer.

    `key`: whose creator leads; by default that of the repositories. `able`: whether this one could work where a leader is
    hindered; it is then asked to give way.
    """
    client = Etcd(settings, settings.lease / _ATTEMPTS)
    key, value = key or leader_key(settings), _value(address)
    try:
        found = client.get(key, within=settings.lease)
        if found is not None and _is_hindered(found.value) and able():
            _ask_to_give_way(client, settings, key, value)
        # While nobody leads, the candidate for which the last leader resigned comes first.
        next_one = found or client.get(successor_key(key), within=settings.lease)
        if found is None and (next_one is None or next_one.value == value):
            lease = _grant(client, settings.lease, settings.lease)
            claim = {
                "compare": [created(key, 0)],
                "success": [etcd.put(key, value, lease.number)],
                "failure": [etcd.get(key)],
            }
            answer = client.txn(claim, within=settings.lease)
            if answer.get("succeeded"):
                fence = int(answer["header"]["revision"])
                return Leader(key, address, client, settings.lease, lease, fence)
            found = next_one = _read(answer)
            # An attempt whose answer was lost may have created it.
            if found is not None and found.lease == lease.number:
                return Leader(key, address, client, settings.lease, lease, found.created)
    except BaseException:
        client.close()
        raise
    client.close()
    return "another one" if next_one is None else _address(next_one.value)


def _ask_to_give_way(client: Etcd, settings: EtcdSettings, key: str, value: bytes) -> None:
    """Ask the leader for the lead, unless another candidate has asked."""
    wanted = successor_key(key)
    lease = _grant(client, settings.lease, settings.lease)
    asked = {
        "compare": [created(wanted, 0)],
        "success": [etcd.put(wanted, value, lease.number)],
    }
    client.txn(asked, within=settings.lease)


def _grant(client: Etcd, seconds: float, within: float) -> _Lease:
    asked_at = now()
    answer = client.call("lease/grant", {"TTL": str(max(1, round(seconds)))}, within=within)
    return _Lease(int(answer["ID"]), float(answer["TTL"]), asked_at)


def _read(answer: dict[str, object], number: int = 0) -> KeyValue | None:
    """The key that a transaction has read as its operation of this number."""
    responses = answer["responses"]
    assert isinstance(responses, list)
    return next(etcd.key_values(responses[number]["response_range"]), None)


def leader_key(settings: EtcdSettings) -> str:
    """The key whose creator leads."""
    return f"{settings.prefix}leader"


def bridge_key(settings: EtcdSettings) -> str:
    """The key whose creator is the active one of several bridges."""
    return f"{settings.prefix}bridge"


def successor_key(key: str) -> str:
    """The key with which a candidate asks the leader of `key` to give way."""
    return f"{key}-successor"


def not_leading(reason: str = "") -> NotLeaderError:
    """The error of a repository that does not lead. `reason`: who does, or why none does here."""
    return NotLeaderError(
        f"this repository does not lead{reason and ': '}{reason}",
        repair="name all of them in [log] repositories; another one leads within seconds",
    )


def _value(address: str, *, hindered: bool = False) -> bytes:
    """The value of a leader's key."""
    return json.dumps({"address": address} | ({"hindered": True} if hindered else {})).encode()


def _is_hindered(value: bytes) -> bool:
    try:
        return json.loads(value).get("hindered") is True
    except (ValueError, AttributeError):
        return False


def _address(value: bytes) -> str:
    try:
        return str(json.loads(value)["address"])[:300]
    except (ValueError, KeyError, TypeError):
        return "another one"
