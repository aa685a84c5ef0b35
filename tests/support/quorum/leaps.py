"""Vote requests of foreign processes, in terms far above all elections. `leap` is a fault of a `World` (`Faults.weights`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from walsender_bridge.quorum.proposer import rivals
from walsender_bridge.quorum.protocol.messages import NodeId, ProposerGreeting, Purpose, Vote
from walsender_bridge.quorum.protocol.terms import MAX_LEAP, MAX_REACH
from walsender_bridge.quorum.safekeeper import effects as e

if TYPE_CHECKING:
    from tests.support.quorum.safekeeper_host import SafekeeperHost
    from tests.support.quorum.world import World

#: By how much a foreign term exceeds the previous one: leaps that are outbid, left out, and refused.
FURTHER = (1, 7, MAX_REACH - 1, MAX_REACH, MAX_LEAP, MAX_LEAP + 1, 1 << 63)
#: The number of a connection that belongs to no proposer.
_STRANGER = -1
#: The greatest term that a safekeeper of an earlier version may have voted in.
_GREATEST = (1 << 64) - 1


def leap(world: World) -> bool:
    """A foreign process requests votes in some terms, always of the same minority; or such a vote was given long ago."""
    leapt = [each for each in world.safekeepers if each.leapt]
    minority = (len(world.safekeepers) - 1) // 2
    chosen = world.choose.choice(leapt if len(leapt) == minority else world.safekeepers)
    if chosen.up and chosen.control.configuration and world.choose.random() < 0.7:
        for _ in range(world.choose.randint(1, 3)):
            _vote(world, chosen, world.choose.choice(FURTHER))
    else:
        chosen.crash()
        last = NodeId(_GREATEST, world.number())
        chosen.control = replace(chosen.control, node_id=last)
    chosen.leapt = True
    return True


def _vote(world: World, chosen: SafekeeperHost, further: int) -> None:
    control = chosen.control
    term = min(control.node_id.term + further, _GREATEST)
    timeline = max(server.timeline for server in world.servers)
    vote = Vote(NodeId(term, world.number()), Purpose.ATTACH, timeline, control.configuration)
    greeting = ProposerGreeting(control.server, 0)
    for event in (
        e.MessageReceived(_STRANGER, greeting),
        e.MessageReceived(_STRANGER, vote),
        e.Closed(_STRANGER),
    ):
        if chosen.up:
            chosen.handle(event)


def lost(world: World, safekeeper: SafekeeperHost) -> bool:
    """Whether its vote is out of reach of any election."""
    term = world.proposer.core.node_id.term
    return safekeeper.leapt and rivals.out_of_reach(safekeeper.control.node_id, term)


def undisturbed(world: World) -> None:
    """A proposer with a quorum is not ended by a safekeeper out of reach: a rival that it could follow has left."""
    for each in world.proposers:
        if each is not world.proposer:
            each.kill()
    ended, proposer = world.happened["stop: OUTVOTED"], world.proposer
    world.run(600)
    assert world.happened["stop: OUTVOTED"] == ended, "a minority ends the proposer again and again"
    assert proposer is world.proposer
    assert proposer.leads, "a minority ends the proposer"
