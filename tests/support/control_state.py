"""A safekeeper's state with every field set, and numbers as large as they may be."""

from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.history import History, HistoryEntry
from walsender_bridge.quorum.protocol.messages import NodeId, ServerInfo
from walsender_bridge.quorum.safekeeper.effects import ControlState, Fence

STATE = ControlState(
    safekeeper=2**128 - 1,
    server=ServerInfo(system_id=7_000_000_000_000_000_001, major=16, segment_size=16 << 20),
    node_id=NodeId(term=9, proposer=2**127 + 5),
    history=History((HistoryEntry(2, 0x100, 1), HistoryEntry(9, 2**63, 2))),
    configuration=Configuration(
        3,
        frozenset({1, 2**100}),
        frozenset({5}),
        term=9,
        distrusted=frozenset({1}),
        quorum=2**127 + 1,
    ),
    fence=Fence(term=8, timeline=1),
    commit_lsn=2**63 + 1,
    restart_lsn=0x200,
)
