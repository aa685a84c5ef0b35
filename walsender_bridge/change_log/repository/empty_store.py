"""The store of a repository that is rebuilt: it has to be empty, and nobody else may use it meanwhile."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from walsender_bridge.change_log.repository.etcd import Etcd, EtcdSettings
from walsender_bridge.change_log.repository.etcd_store import EtcdStore
from walsender_bridge.change_log.repository.leader_lease import leader_key, try_to_lead
from walsender_bridge.change_log.repository.record_store import FoldedStore
from walsender_bridge.change_log.repository.store import RepositoryStore
from walsender_bridge.errors import ConfigError, RunningError
from walsender_bridge.runtime.private_folder import private_folder

#: Seconds for etcd to answer, and for one member of it.
_WITHIN: Final = 4.0
_ATTEMPT: Final = 1.0


def check(file: Path, cluster: EtcdSettings | None) -> None:
    """Raise `ConfigError` if there is a repository: in etcd, or (`cluster` None) in the SQLite file. Creates nothing."""
    if cluster is not None:
        _check_etcd(cluster)
    elif file.exists():
        with _sqlite(file):
            pass


@contextlib.contextmanager
def opened(file: Path, cluster: EtcdSettings | None) -> Iterator[FoldedStore]:
    """The empty store. Raises `ConfigError` if it is not empty or in use, `RunningError` if a repository leads."""
    with _sqlite(file) if cluster is None else _etcd(cluster) as store:
        yield store


@contextlib.contextmanager
def _sqlite(file: Path) -> Iterator[FoldedStore]:
    private_folder(file.parent)
    store = RepositoryStore(file)
    try:
        if store.state.log_id:
            raise _there_is_one(str(file), store.state.log_id, f"mv {file}* OLD/")
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def _etcd(cluster: EtcdSettings) -> Iterator[FoldedStore]:
    """The records in etcd, led by this process.

    An etcd that has lost its data counts its revisions again, so the fence of a leader from before could be valid once more.
    That leader finds its key missing, and stops within a lease, which is waited for before this process leads.
    """
    _check_etcd(cluster)
    time.sleep(cluster.lease)
    leader = try_to_lead(cluster, "log rebuild")
    if isinstance(leader, str):
        raise _led(leader)
    try:
        store = EtcdStore(cluster, leader)
        try:
            # Another repository may have led during the wait.
            if store.state.log_id:
                raise _there_is_one(f"etcd, {cluster.prefix}", store.state.log_id, _remove(cluster))
            yield store
        finally:
            store.close()
    finally:
        leader.resign()


def _check_etcd(cluster: EtcdSettings) -> None:
    with Etcd(cluster, _ATTEMPT) as client:
        if client.get(leader_key(cluster), within=_WITHIN) is not None:
            raise _led(client.where)
        names = (f"{cluster.prefix}checkpoint", f"{cluster.prefix}record/")
        if any(next(client.scan(each, within=_WITHIN), None) for each in names):
            where = f"{client.where}, prefix {cluster.prefix}"
            raise _there_is_one(where, "", _remove(cluster))


def _remove(cluster: EtcdSettings) -> str:
    return f"etcdctl del --prefix {cluster.prefix}"


def _led(where: str) -> RunningError:
    return RunningError(
        "a repository leads",
        where=where,
        repair="stop all repositories of this log (`tuskline down`) before you rebuild one",
    )


def _there_is_one(where: str, log_id: str, removal: str) -> ConfigError:
    return ConfigError(
        f"there is a repository already{log_id and ', of log '}{log_id}",
        where=where,
        repair=f"start it; or, if it is one that was started by mistake after the loss, remove it first: {removal}",
    )
