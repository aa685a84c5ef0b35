"""The state of a cluster of etcd, as each of the configured members reports it: for `status` and `doctor`."""

import contextlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

from walsender_bridge.change_log.repository.etcd import Etcd, EtcdSettings
from walsender_bridge.change_log.repository.leader_lease import leader_key
from walsender_bridge.errors import NotSupportedError, TusklineError

#: Seconds for a member to answer.
_ANSWER: Final = 1.0
#: Seconds for a majority to answer, by any of them.
_MAJORITY: Final = 2.0
#: The metric of etcd with the most bytes that its database may have.
_QUOTA: Final = re.compile(rb"^etcd_server_quota_backend_bytes (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class EtcdMember:
    """A configured member. `error`: why it does not answer; without one, what it says of itself.

    `size`: bytes of its database, of at most `quota`; None: unknown. `alarms`: of the whole cluster, such as `NOSPACE`.
    """

    endpoint: str
    error: TusklineError | None = None
    cluster: str = ""
    version: str = ""
    size: int | None = None
    quota: int | None = None
    alarms: frozenset[str] = frozenset()
    #: How many members the cluster has, by this one.
    members: int = 0

    @property
    def used(self) -> float | None:
        """The part of its quota that its database has."""
        return None if self.size is None or not self.quota else self.size / self.quota


@dataclass(frozen=True, slots=True)
class EtcdCluster:
    """The configured members, and why a majority cannot be read from (None: it can)."""

    members: tuple[EtcdMember, ...]
    error: TusklineError | None

    @property
    def answering(self) -> tuple[EtcdMember, ...]:
        """Those that answer."""
        return tuple(each for each in self.members if each.error is None)


def ask(settings: EtcdSettings) -> EtcdCluster:
    """Ask all configured members at once, and read a key that a majority has to confirm."""
    count = len(settings.endpoints)
    with ThreadPoolExecutor(count + 1) as pool:
        majority = pool.submit(_read, settings)
        members = pool.map(lambda each: _member(settings, each), settings.endpoints)
        return EtcdCluster(tuple(members), majority.result())


def _read(settings: EtcdSettings) -> TusklineError | None:
    try:
        with Etcd(settings, _ANSWER) as client:
            client.get(leader_key(settings), within=_MAJORITY)
    except TusklineError as error:
        return error
    return None


def _member(settings: EtcdSettings, endpoint: str) -> EtcdMember:
    found = EtcdMember(endpoint)
    try:
        with Etcd(replace(settings, endpoints=(endpoint,)), _ANSWER) as client:
            status = client.call("maintenance/status", {}, within=0.0)
            found = replace(
                found,
                cluster=str(status["header"]["cluster_id"]),
                version=str(status.get("version", "")),
                size=int(status.get("dbSize", 0)),
            )
            # What only a majority knows, or this member hides, is left out.
            with contextlib.suppress(TusklineError):
                alarms = client.call("maintenance/alarm", {"action": "GET"}, within=0.0)
                found = replace(found, alarms=frozenset(_alarms(alarms)))
                listed = client.call("cluster/member/list", {}, within=0.0)
                found = replace(found, members=len(listed.get("members", ())))
            match = _QUOTA.search(client.metrics())
            return replace(found, quota=int(float(match[1])) if match else None)
    except TusklineError as error:
        return replace(found, error=error)
    except (KeyError, TypeError, ValueError, AttributeError):
        other = NotSupportedError(
            "its answer is not that of etcd", where=endpoint, repair="check [etcd] endpoints"
        )
        return replace(found, error=other)


def _alarms(answer: dict[str, Any]) -> Iterator[str]:
    for each in answer.get("alarms", ()):
        yield str(each.get("alarm", "NONE"))
