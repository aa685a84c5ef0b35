"""The world of `log_world.py`, with strangers who hold a writer's certificate, and open writers with terms that nobody gave."""

from functools import partial

from tests.support.log_entries import EntryMaker
from tests.support.log_world import Machine, World, Writer
from walsender_bridge.change_log.protocol import TERMS_AHEAD
from walsender_bridge.change_log.replica.core import Replica, ReplicaState


class StrangerWorld(World):
    """See the module. What a stranger writes is on one machine alone."""

    EVENTS = (*World.EVENTS, ("forge", 1.5))

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        #: The terms that strangers have opened: `reopen` opens them on further machines.
        self.forged: set[int] = set()

    def may_end_apart(self, machine: Machine) -> bool:
        """Also if a stranger has opened it with the term of the seal, after the seal."""
        assert machine.core is not None
        is_forged = machine.core.current.term in self.forged
        return is_forged or super().may_end_apart(machine)

    def forge(self) -> None:
        """Open a writer with a higher term, as far as the machine lets it."""
        machine = self.machines[self.choose.choice([*self.machines])]
        core = machine.core
        if not machine.up or core is None:
            return
        term = core.current.term + self.choose.choice((1, 2, TERMS_AHEAD))
        self.faults += 1
        if not self.attempt(lambda: machine.do(lambda core: core.open_writer(term))):
            return
        self.happened["forged"] += 1
        self.forged.add(term)
        machine.session += 1
        make = EntryMaker(self.choose.getrandbits(32))
        assert machine.core is not None
        make.follow(machine.core.status())
        start = machine.core.tail.end_offset
        self.writers.append(Writer(term, {machine.name: machine.session}, make, start))


class CertifiedWorld(StrangerWorld):
    """Strangers who know the present term of a machine, and open it while it is not in sync, so that no writer is disturbed."""

    def forge(self) -> None:
        """Open a replica that is sealed, and not a member."""
        for name in self.stream.outside:
            machine = self.machines.get(name)
            if machine is not None and machine.up and _is_sealed(machine):
                assert machine.core is not None
                term = machine.core.current.term
                machine.do(partial(Replica.open_writer, term=term))
                self.forged.add(term)
                machine.session += 1
                self.faults += 1
                self.happened["forged"] += 1


def _is_sealed(machine: Machine) -> bool:
    return machine.core is not None and machine.core.state == ReplicaState.SEALED
