"""What each role may ask of the change log's services: the whole table, written out a second time."""

from walsender_bridge.change_log import log_server_messages, repository_messages
from walsender_bridge.change_log.actions import Action
from walsender_bridge.runtime.certificate_holder import Role

#: w: writer, c: repository, r: reader, l: lake, m: monitor, o: operator, s: log server.
TABLE = {
    "append": "w    o",
    "read": "  rl o",
    "report": " c    ",
    "commit": " c    ",
    "create": " c    ",
    "learn": " c    ",
    "cut_tail": "w    o",
    "seal": " c    ",
    "joined": " c    ",
    "trim": " c    ",
    "trim_point": " c    ",
    "stream_status": "w rlmo",
    "schema": "  rl o",
    "relations": "  rl o",
    "plan": "  rl o",
    "version_at": "  rl o",
    "cut_before": "  rl o",
    "transactions": "w    o",
    "status": "w rlmo",
    "create_stream": "w    o",
    "writer_term": "w    o",
    "barrier": "w rl o",
    "register_consumer": "  rl o",
    "drop_consumer": "   l o",
    "raise_version": "   l o",
    "describe": "w rlmo",
    "replicas": "wcrlmo",
    "commits": " crl o",
    "trim_stream": "     o",
    "sync": "      s",
    "synchronize": " c    ",
}
ROLES = {
    "w": Role.WRITER,
    "c": Role.REPOSITORY,
    "r": Role.READER,
    "l": Role.LAKE,
    "m": Role.MONITOR,
    "o": Role.OPERATOR,
    "s": Role.LOG_SERVER,
}
ACTIONS = {
    each.name
    for module in (log_server_messages, repository_messages)
    for each in vars(module).values()
    if isinstance(each, Action)
}


def refused(role: Role) -> set[str]:
    """What a holder of this role alone may not ask for."""
    return {name for name, letters in TABLE.items() if role not in map(ROLES.get, letters)}
