"""Other quorums besides the one that has the committed WAL, formed of safekeepers that lost their disks.

The decisions are the product's (`quorum_id`): the records at the bridge and on its server, and the answers of the
safekeepers at a proposer's addresses. So a second quorum is formed only where the first one is unknown: on a copy of the
server, whose commits do not count. `stranger`, `second` and `emptied` are faults of a `World`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.quorum.wal import Server
from walsender_bridge.errors import DivergedError, UnavailableError
from walsender_bridge.quorum.proposer import quorum_id
from walsender_bridge.quorum.proposer.quorum_id import KnownQuorumId
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.messages import Purpose, SafekeeperGreeting

if TYPE_CHECKING:
    from tests.support.quorum.safekeeper_host import SafekeeperHost
    from tests.support.quorum.world import World


@dataclass(frozen=True, slots=True)
class Beside:
    """The start of another quorum's proposer. `copy`: its server is not ours, but a copy of it."""

    configuration: Configuration
    peers: tuple[int, ...]
    copy: bool


def stranger(world: World) -> bool:
    """A proposer is started for a safekeeper that lost its disk, on a copy of the server."""
    lost = _lost_disk(world)
    if lost is None:
        return False
    # It may be from before ids, too, as long as ours is.
    has_id = world.choose.random() < 0.5 or not world.faults.without_id
    beside = _begin(world, [lost], KnownQuorumId(), world.number() if has_id else 0, copy=True)
    _start_beside(world, beside, _copy(world.server), above=world.choose.randint(0, 40))
    return True


def second(world: World) -> bool:
    """The same on our own server: two quorums would acknowledge its commits."""
    lost = _lost_disk(world)
    if lost is not None and (beside := _begin_on_ours(world, [lost])):
        _start_beside(world, beside, world.server)
    return lost is not None


def emptied(world: World) -> bool:
    """All safekeepers' folders are moved away while no process runs; and put back when the proposer refuses them."""
    if not world.settled or len(world.own_safekeepers) < len(world.safekeepers):
        return False
    for proposer in world.proposers:
        proposer.kill()
    folders = []
    for safekeeper in world.safekeepers:
        safekeeper.crash()
        folders.append((safekeeper.identity, safekeeper.disk, safekeeper.control))
        safekeeper.new_disk()
    beside = _begin_on_ours(world, world.safekeepers)
    if beside is not None:
        _start_beside(world, beside, world.server)
        return True
    for safekeeper, folder in zip(world.safekeepers, folders, strict=True):
        safekeeper.identity, safekeeper.disk, safekeeper.control = folder
    world.restart_proposer(world.proposer)
    return True


def _lost_disk(world: World) -> SafekeeperHost | None:
    """A safekeeper loses its disk, if that is allowed; returns it."""
    before = {safekeeper.number: safekeeper.identity for safekeeper in world.safekeepers}
    if not world.fault_disk():
        return None
    return next(s for s in world.safekeepers if s.identity != before[s.number])


def _start_beside(world: World, beside: Beside, server: Server, above: int = 0) -> None:
    host = world.host_of_proposers(world, server, Purpose.ATTACH, above, beside)
    world.proposers.append(host)

    def tick() -> None:
        if host.alive:
            if beside.copy:
                server.work()
            host.tick()
            world.at(25, tick)

    world.at(25, tick)
    world.at(world.choose.uniform(60, 300), host.kill)


def _begin(
    world: World,
    safekeepers: Sequence[SafekeeperHost],
    known: KnownQuorumId,
    quorum: int,
    *,
    copy: bool,
) -> Beside:
    """A proposer is started for these safekeepers only. Raises the error that keeps it from forming a quorum of them."""
    asked = [_greeting(safekeeper) for safekeeper in safekeepers]
    addresses = [("safekeeper", safekeeper.number) for safekeeper in safekeepers]
    assert not quorum_id.in_force(asked, len(asked), known), "they are new"
    held = quorum_id.first(dict(enumerate(asked)), addresses, known)
    for safekeeper in safekeepers:
        safekeeper.foreign = True
    world.happened["another quorum"] += 1
    numbers = tuple(safekeeper.number for safekeeper in safekeepers)
    return Beside(Configuration(1, held.members, quorum=quorum), numbers, copy)


def _greeting(safekeeper: SafekeeperHost) -> SafekeeperGreeting:
    control = safekeeper.control
    return SafekeeperGreeting(
        control.safekeeper, control.server, control.node_id, control.configuration, 0, 0, 0
    )


def _begin_on_ours(world: World, safekeepers: Sequence[SafekeeperHost]) -> Beside | None:
    """The same for our own server, which has the record of our quorum; None: it was refused."""
    known = KnownQuorumId(world.quorum, formed=True)
    try:
        return _begin(world, safekeepers, known, world.number(), copy=False)
    except (DivergedError, UnavailableError):
        world.happened["refused beside"] += 1
        return None


def _copy(server: Server) -> Server:
    """A server that was restored from a backup of this one: it writes WAL of its own from now on."""
    cells = {at: cell for at, cell in server.cells.items() if at < server.flush_lsn}
    return Server(
        server.records, server.choose, server.begin, server.timeline, server.switches, cells
    )
