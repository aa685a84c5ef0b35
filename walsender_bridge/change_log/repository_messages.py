"""The actions of the metadata repository: their requests and answers. `LogClient` says what they do."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from walsender_bridge.change_log.actions import Action, Empty
from walsender_bridge.change_log.protocol import StreamCut
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.runtime.error_record import ErrorRecord


@dataclass(frozen=True, slots=True)
class StatusAnswer:
    """See `LogStatus`."""

    log_id: str
    version: int
    forced_version: int
    streams: Mapping[str, StreamCut]
    faults: Mapping[str, ErrorRecord]


@dataclass(frozen=True, slots=True)
class CreateStreamRequest:
    """`stream`: its name, which is checked by the repository."""

    stream: str


@dataclass(frozen=True, slots=True)
class WriterTermRequest:
    """`stream`: the one to be written. `failed`: addresses of log servers at which its last writer failed."""

    stream: str
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WriterTermAnswer:
    """`term`: greater than any issued before. `addresses`: of the log servers to write to, all of them."""

    term: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BarrierRequest:
    """`positions`: end LSNs by stream. `timeout` in seconds."""

    positions: Mapping[str, Lsn]
    timeout: float


@dataclass(frozen=True, slots=True)
class BarrierAnswer:
    """`version`: the one that was forced; it can be read."""

    version: int


@dataclass(frozen=True, slots=True)
class RegisterConsumerRequest:
    """`version`: the last one that the consumer published; None: none yet."""

    name: str
    version: int | None
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class DropConsumerRequest:
    """`name`: of the consumer whose lease ends."""

    name: str


@dataclass(frozen=True, slots=True)
class RaiseVersionRequest:
    """`version`: the last one to be skipped."""

    version: int


STATUS: Final = Action("status", Empty, StatusAnswer)
CREATE_STREAM: Final = Action("create_stream", CreateStreamRequest, StreamCut)
WRITER_TERM: Final = Action("writer_term", WriterTermRequest, WriterTermAnswer)
BARRIER: Final = Action("barrier", BarrierRequest, BarrierAnswer)
REGISTER_CONSUMER: Final = Action("register_consumer", RegisterConsumerRequest, Empty)
DROP_CONSUMER: Final = Action("drop_consumer", DropConsumerRequest, Empty)
RAISE_VERSION: Final = Action("raise_version", RaiseVersionRequest, Empty)
