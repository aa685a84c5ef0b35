"""Where the search begins, and which events it is given: small domains, each whole up to eight events."""

from tests.support.slots.decoder import Position
from tests.support.slots.search import follow
from tests.support.slots.world import World, first_world

_MARKED = ("poll", "do")


def first() -> World:
    """The initial state."""
    return first_world()


def reserved() -> World:
    """The physical slot has its incarnation id, and the copy its temporary name."""
    return follow(_MARKED)


def ready() -> World:
    """A copy that a decoder has moved."""
    world = follow((*_MARKED, "tell", "change", "move", "poll", "tell", "change", "move", "do"))
    return follow(("tell", "change", "move", "do", "tell", "do", "do", "poll"), world)


def row() -> World:
    """The slot's client has not yet got a change, a row of which was replaced since."""
    return follow(("row", "poll"), ready())


def opened() -> World:
    """The same with a long transaction, which runs where the copy's decoder begins."""
    return follow(
        ("begin", "ddl", "move", "tell", "do", "change", "move", "tell", "do", "poll"), ready()
    )


def unproven() -> World:
    """A copy was created that holds less than it needs: a transaction has been open since before."""
    return follow(("find_file", "begin", "ddl", "run", "confirm", *_MARKED, "tell", "poll", "tell"))


def undecoded() -> World:
    """A copy is used that no decoder has moved: a transaction has been open since before it was created."""
    world = unproven()
    while world.copy is None:
        world = follow(("do",), world)
    return follow(("poll",), world)


def taken_over() -> World:
    """Another controller, which knows nothing of that copy, takes it over before it is proven."""
    return follow(("succeed", "poll", "poll", "tell"), unproven())


def behind() -> World:
    """The copy is past its restart_lsn."""
    return follow(("change", "confirm", "do", "tell", "poll"), ready())


def lagging() -> World:
    """The copy stands by itself, and its standby receives nothing any more."""
    return follow(("checkpoint", "fall_behind"), ready())


def held() -> World:
    """A transaction that writes nothing runs where the copy's decoder begins."""
    return follow(("hold", "change", "move", "do", "tell", "poll"), ready())


def unheard() -> World:
    """The standby had no slot for a moment and said so, which the primary has yet to hear; the copy is new."""
    world = ready()
    world = world._replace(said=((world.clock + 1, 0),), clock=world.clock + 1, memory=())
    copy = world.copy
    world = world._replace(copy=None, unproven=copy, pending=(), promised=False)
    # The controller's record of a copy that it has just created there.
    before = reserved().memory
    world = world._replace(memory=before, physical=world.physical._replace(reply=world.clock - 3))
    return follow(("poll", "row"), world)


def restored() -> World:
    """The standby is about to be put back; in its backup the copy has an older catalog_xmin than it needs now."""
    world = undecoded()
    copy = world.copy
    assert copy is not None
    at = Position(copy.at.restart, copy.at.confirmed, world.slot.xmin)
    return world._replace(backup=copy._replace(at=at))


def borrowed() -> World:
    """A copy was created where another decoder's snapshot lacks changes that are newer than an open transaction."""
    made = ("hold", "ddl", "run", "confirm", "find_other_file", *_MARKED, "tell", "poll", "tell")
    return follow(made)


def rewritten() -> World:
    """The slot's client has not got a transaction whose catalog rows were moved, and a restartpoint forgot where to."""
    told = ("tell", "poll", "tell", "poll", "tell")
    return follow(("find_file", "alter", "rewrite", "sweep", *_MARKED, *told))


def sweeping() -> World:
    """The same, but the restartpoint is still in progress."""
    told = ("tell", "poll", "tell", "poll", "tell")
    return follow(("find_file", "alter", "rewrite", "restartpoint", *_MARKED, *told))


def native() -> World:
    """PostgreSQL's own copy, not finished."""
    world = ready()
    copy = world.copy
    assert copy is not None
    return follow(
        ("tell",), world._replace(copy=copy._replace(synced=True, lasting=False), promised=False)
    )


_BASE = ("row", "move", "vacuum", "tell", "do", "poll")
SCOPES = {
    "transactions": (
        (reserved, ready, opened, undecoded),
        (
            *("change", "begin", "commit", "ddl", "run", "confirm", "vacuum", "tell", "do"),
            *("poll", "poll_astray", "find_other_file", "succeed"),
        ),
    ),
    "epochs": (
        (reserved, row, opened, undecoded, taken_over),
        (
            *_BASE,
            "reconnect",
            "mark",
            "poll_under_way",
            "recrash",
            "reswap",
            "checkpoint",
            "feedback_off",
            "feedback_on",
            "hear",
        ),
    ),
    "replies": (
        (first, row, unheard),
        (
            *_BASE,
            "feedback",
            "reply",
            "hear",
            "delete_copy",
            "delete_unproven",
            "poll_under_way",
            "act",
        ),
    ),
    "rewrites": (
        (first, rewritten, sweeping, ready),
        (
            *("alter", "rewrite", "run", "confirm", "tell", "do", "poll", "succeed"),
            *("restartpoint", "remove_files", "delete_copy", "forget_mappings", "poll_under_way"),
        ),
    ),
    "clients": (
        (lagging,),
        (
            *_BASE,
            *("change", "confirm", "checkpoint", "recrash", "reconnect", "restore"),
            *("fall_behind", "receive", "poll_astray", "remake"),
        ),
    ),
    "databases": (
        (ready, unproven, lagging),
        (
            *(*_BASE, "alter_database", "finish_database", "replay_database", "receive"),
            *("poll_under_way", "recrash", "reconnect", "poll_astray"),
        ),
    ),
    "others": (
        (ready, held, behind, restored, native),
        (
            *(*_BASE, "change", "commit", "consume", "lose_wal", "lose_file", "find_file"),
            *("find_other_file", "usurp"),
            *("rest", "outgrow", "invalidate", "restore", "remake", "remake_other", "act_cut"),
        ),
    ),
}
