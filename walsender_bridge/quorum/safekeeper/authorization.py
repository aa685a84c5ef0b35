"""What the holder of a certificate may send to a safekeeper. Pure.

| role | its holder |
|---|---|
| `proposer` | proposes: greets, votes, appends, changes members |
| `operator` | the same: a failover is an election |
| `safekeeper`, `monitor` | greet, which asks for the state and changes nothing |

A message that no role of the holder has is refused before the core sees it. A message that is missing here is nobody's but the
proposer's.
"""

from typing import Final, get_args

from walsender_bridge.errors import PrivilegeError
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.runtime.certificate_holder import Identity, Role

_ALL: Final[frozenset[type]] = frozenset(get_args(m.ToSafekeeper))
ALLOWED: Final[dict[Role, frozenset[type]]] = {
    Role.PROPOSER: _ALL,
    Role.OPERATOR: _ALL,
    Role.SAFEKEEPER: frozenset({m.ProposerGreeting}),
    Role.MONITOR: frozenset({m.ProposerGreeting}),
}


def check(holder: Identity, message: m.ToSafekeeper) -> None:
    """Raise `PrivilegeError` unless a role of the holder has this message."""
    kind = type(message)
    if not any(kind in ALLOWED.get(role, ()) for role in holder.roles):
        able = [role for role, messages in ALLOWED.items() if kind in messages]
        raise PrivilegeError(
            f"the certificate of {holder} does not allow {kind.__name__}",
            repair=f"use a certificate with the role {' or '.join(able)}",
        )
