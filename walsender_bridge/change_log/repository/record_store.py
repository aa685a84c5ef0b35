"""What the metadata repository needs of its store, and what all stores share.

A store is a log of records with a checkpoint: the state is the fold of both. `store.py` keeps them in SQLite, `etcd_store.py`
in etcd.

If a record violates an invariant of the state, neither this record nor any later one is written.
"""

from abc import ABC, abstractmethod
from typing import Any, Protocol

import google_crc32c

from walsender_bridge.change_log.repository.core import Record, Repository, record_to_json
from walsender_bridge.change_log.repository.invariants import Checked, check_invariants, checked
from walsender_bridge.errors import InvariantError
from walsender_bridge.runtime import logs

#: Records after which a checkpoint is written.
CHECKPOINT_EVERY = 1000

_log = logs.logger()


class RecordStore(Protocol):
    """The state of a repository, kept durably. One thread at a time."""

    @property
    def state(self) -> Repository:
        """The state after all stored records."""

    def append(self, record: Record) -> bool:
        """Apply a record to `state`, and store it durably if it changed anything; whether it did.

        Raises `UnavailableError` if it may not be stored, `NotLeaderError` if another repository has taken over, and
        `InvariantError` now and for each later record; `state` is then that of the stored records.
        """

    def confirm(self) -> None:
        """Raise `NotLeaderError` if another repository may have written since `state` was read."""

    def reload(self) -> None:
        """Read `state` from the stored records now."""

    def close(self) -> None:
        """Let go of the store, which another repository may then open."""


class FoldedStore(ABC):
    """A `RecordStore` that keeps the records and the checkpoint somewhere; `checkpoint_every`: records between two."""

    def __init__(self, where: str, checkpoint_every: int) -> None:
        self._where = where
        self._checkpoint_every = checkpoint_every
        #: The error because of which nothing is written any more.
        self._stopped: InvariantError | None = None
        self._state: Repository | None = None
        #: The numbers of the last record, and of the last one that the checkpoint contains.
        self._number = self._checkpointed = 0

    @abstractmethod
    def confirm(self) -> None:
        """See `RecordStore`."""

    @abstractmethod
    def _load(self) -> Repository:
        """Fold checkpoint and records; sets both numbers."""

    @abstractmethod
    def _keep(self, number: int, body: str) -> None:
        """Store the record with the next number durably. Raises `UnavailableError`, `NotLeaderError`."""

    @abstractmethod
    def checkpoint(self) -> None:
        """Write the state, and delete the records before it."""

    @abstractmethod
    def _is_storage_error(self, error: Exception) -> bool:
        """Whether a checkpoint that failed so is retried with the next record."""

    @property
    def state(self) -> Repository:
        """The state after all stored records; loaded if necessary."""
        if self._state is None:
            self._state = self._load()
        return self._state

    def append(self, record: Record) -> bool:
        """See `RecordStore`."""
        if self._stopped is not None:
            raise self._stopped.with_traceback(None)
        state = self.state
        before = checked(state)
        # The state is ahead of the store until the record is stored: if that fails, it is reloaded at its next use.
        self._state = None
        changed = state.apply(record)
        if changed:
            self._check(state, before)
            self._keep(self._number + 1, record_to_json(record))
            self._number += 1
        self._state = state
        if changed and self._number - self._checkpointed >= self._checkpoint_every:
            self._checkpoint_unless_it_fails()
        return changed

    def _checkpoint_unless_it_fails(self) -> None:
        # The record is already durable; a failed checkpoint is retried with the next record.
        try:
            self.checkpoint()
        except Exception as error:
            if not self._is_storage_error(error):
                raise
            _log.warning("checkpoint failed", error=str(error), where=self._where)

    def _check(self, state: Repository, before: Checked) -> None:
        try:
            check_invariants(state, before)
        except InvariantError as error:
            self._stopped = error
            raise

    def begin_with(self, state: Repository) -> None:
        """Begin an empty store with a state, in one step; see `rebuild.py`. Raises `InvariantError`, and the store's errors."""
        assert not self.state.log_id, "a store is of one log"
        check_invariants(state, checked(state))
        self._state = state
        try:
            self.checkpoint()
        except BaseException:
            self._state = None
            raise

    def reload(self) -> None:
        """See `RecordStore`."""
        self._state = self._load()


def split_histories(state: Repository) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The state as JSON without its commits, and the commits of each stream: [context, position] each."""
    record = state.to_record()
    histories = {name: stream.pop("history") for name, stream in record["streams"].items()}
    return record, histories


def crc(*values: object) -> int:
    """The checksum (CRC32C) that is stored beside these values."""
    return int(google_crc32c.value("\n".join(map(str, values)).encode()))
