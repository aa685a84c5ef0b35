"""The cluster of `[etcd]` at one moment: what is wrong with it, for `status`, `/readyz` and `doctor`."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from walsender_bridge.errors import (
    ConfigError,
    CorruptError,
    DiskFullError,
    NotSupportedError,
    TusklineError,
    UnavailableError,
)

if TYPE_CHECKING:
    from walsender_bridge.change_log.repository.etcd_cluster import EtcdCluster, EtcdMember
    from walsender_bridge.config import Config
    from walsender_bridge.observability.certificate_view import CertificateView

#: The first version with the interface that is used.
_OLDEST: Final = (3, 4)
#: The part of its quota from which on etcd's space should be looked at.
_NEARLY_FULL: Final = 0.8
_COMPACT: Final = "compact and defragment etcd (docs/log.md)"


class EtcdFault(NamedTuple):
    """`fatal`: nothing is committed because of it; otherwise the cluster works, and is less safe than it should be."""

    error: TusklineError
    fatal: bool


@dataclass(frozen=True, slots=True)
class EtcdView:
    """The cluster as its members report it, and the faults that this shows."""

    cluster: "EtcdCluster"
    faults: tuple[EtcdFault, ...]

    @property
    def summary(self) -> str:
        """How many members answer, their versions, and how full they are."""
        answering = self.cluster.answering
        versions = ", ".join(sorted({each.version for each in answering}))
        used = max((each.used or 0.0 for each in answering), default=0.0)
        count = f"{len(answering)} of {len(self.cluster.members)} members answer"
        return f"{count}, version {versions}, {used:.0%} of the quota used"


def observe(settings: "Config") -> EtcdView | None:
    """The cluster now; None without `[etcd]`."""
    if settings.etcd is None:
        return None
    from walsender_bridge.change_log.repository import etcd_cluster
    from walsender_bridge.change_log.repository.etcd import EtcdSettings
    from walsender_bridge.observability import certificate_view

    cluster = etcd_cluster.ask(EtcdSettings.of(settings.etcd))
    files = settings.etcd.tls_files
    certificate = None if files is None else certificate_view.of_files(files)
    return EtcdView(cluster, (*faults(cluster), *_of_certificate(certificate, time.time())))


def faults(cluster: "EtcdCluster") -> Iterator[EtcdFault]:
    """What is wrong with the cluster."""
    if cluster.error is not None:
        yield EtcdFault(_no_majority(cluster, cluster.error), fatal=True)
    for each in cluster.members:
        if each.error is not None:
            error = type(each.error)(
                f"the member does not answer: {each.error.what.removeprefix('etcd does not answer: ')}",
                where=each.endpoint,
                repair=each.error.repair,
            )
            yield EtcdFault(error, fatal=False)
    alarms = frozenset(alarm for each in cluster.answering for alarm in each.alarms)
    yield from _of_alarms(alarms, cluster.answering)
    if len({each.cluster for each in cluster.answering}) > 1:
        what = "endpoints names members of different clusters"
        yield EtcdFault(
            ConfigError(what, where=_places(cluster.answering), repair="name those of one cluster"),
            fatal=True,
        )
    for each in cluster.answering:
        yield from _of_member(each, len(cluster.members), full="NOSPACE" in alarms)


def _no_majority(cluster: "EtcdCluster", error: TusklineError) -> TusklineError:
    count = f"{len(cluster.answering)} of {len(cluster.members)} members answer"
    return UnavailableError(
        f"no majority of its members answers ({count}), so nothing is committed: {error.what}",
        where=_places(cluster.members),
        repair=error.repair,
    )


def _of_alarms(alarms: frozenset[str], members: "tuple[EtcdMember, ...]") -> Iterator[EtcdFault]:
    if "NOSPACE" in alarms:
        error: TusklineError = DiskFullError(
            "its space is exhausted (alarm NOSPACE), so nothing is committed",
            where=_places(members),
            repair=f"{_COMPACT}, then `etcdctl alarm disarm`",
        )
        yield EtcdFault(error, fatal=True)
    if "CORRUPT" in alarms:
        error = CorruptError(
            "its members have different data (alarm CORRUPT)",
            where=_places(members),
            repair="replace the member that is wrong, as etcd's documentation says; see docs/log-lost.md for the log",
        )
        yield EtcdFault(error, fatal=True)


def _of_member(member: "EtcdMember", named: int, *, full: bool) -> Iterator[EtcdFault]:
    if _version(member.version) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        error: TusklineError = NotSupportedError(
            f"its version is {member.version or 'unknown'}",
            where=member.endpoint,
            repair=f"use etcd {oldest} or later",
        )
        yield EtcdFault(error, fatal=True)
    if member.used is not None and member.used >= _NEARLY_FULL and not full:
        error = DiskFullError(
            f"{member.used:.0%} of its quota is used", where=member.endpoint, repair=_COMPACT
        )
        yield EtcdFault(error, fatal=False)
    if member.members > named:
        error = ConfigError(
            f"endpoints names {named} of {member.members} members",
            where=member.endpoint,
            repair="name all of them: this machine cannot reach etcd while those that are named are away",
        )
        yield EtcdFault(error, fatal=False)


def _of_certificate(certificate: "CertificateView | None", now: float) -> Iterator[EtcdFault]:
    if certificate is not None and (what := certificate.problem(now)):
        repair = "issue another one, and copy its files over those of [etcd]"
        error = ConfigError(what, repair=repair)
        yield EtcdFault(error, fatal=certificate.is_over(now))


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(".")[:2] if each.isdigit())


def _places(members: "tuple[EtcdMember, ...]") -> str:
    return ", ".join(each.endpoint for each in members)
