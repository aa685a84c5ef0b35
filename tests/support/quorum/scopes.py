"""The small clusters that are explored, by name.

Those of `make test` are small; each of the rules 1 to 6 has one in which its violation shows. `2 terms`: two proposers,
three safekeepers and two LSNs, of one server (`2 terms`) and of one that was promoted behind the first LSN
(`2 terms, promoted`). `3 terms`: the same with three LSNs and another proposer, so that one of the two can be a
restarted one.
"""

from tests.support.quorum.claims import BASE
from tests.support.quorum.explorer import Scope

OLD = ((1, BASE, 1),)
NOTHING = ((), BASE)
ENDLESS = 10**9
SCOPES = {
    # Two proposers of one server.
    "rivals": Scope(((1, BASE, 9), (1, BASE, 9))),
    # A tail that one safekeeper has and a promoted server replaces, with a power cut between any two effects.
    "tail": Scope(((2, 9, 11),), logs=((OLD, 9), (OLD, 9), (OLD, 10)), breaks=1),
    # A tail in another version than the quorum's.
    "version": Scope(
        ((2, 9, 11),), logs=(((*OLD, (2, 9, 2)), 10), ((*OLD, (2, 9, 2)), 10), (OLD, 10))
    ),
    # Raft's figure 8 in bytes.
    "figure 8": Scope(
        ((1, BASE, 10), (2, BASE, 9)),
        logs=((((3, BASE, 2),), 9), (((2, BASE, 1),), 10), NOTHING),
        append_bytes=1,
    ),
    # A log that one safekeeper has alone.
    "ahead": Scope(((1, BASE, 9), (1, BASE, 9)), logs=((OLD, 9), NOTHING, NOTHING)),
    # One safekeeper, whose connections break.
    "resumption": Scope(((1, BASE, 9), (1, BASE, 9)), safekeepers=1, breaks=2),
    # Two servers that diverge from the first byte on: they share no WAL.
    "strangers": Scope(((1, BASE, 9), (2, BASE, 9))),
    "2 terms": Scope(((1, BASE, 10), (1, BASE, 10)), append_bytes=1, limit=ENDLESS),
    "2 terms, promoted": Scope(((1, BASE, 10), (2, 9, 11)), append_bytes=1, limit=ENDLESS),
    "2 terms, a break": Scope(
        ((1, BASE, 10), (1, BASE, 10)), append_bytes=1, breaks=1, limit=ENDLESS
    ),
    "3 terms": Scope(((1, BASE, 11),) * 3, append_bytes=1, limit=ENDLESS),
    "3 terms, promoted": Scope(
        ((1, BASE, 11), (1, BASE, 11), (2, 9, 12)), append_bytes=1, limit=ENDLESS
    ),
}
#: In which of them a mutant shows.
FOUND_IN = {
    "1: VCL from before the vote": "rivals",
    "2: a vote for an equal term": "rivals",
    "2: an epoch that is no term": "strangers",
    "3: no zeros over the tail": "tail",
    "3: the history first": "tail",
    "4: commits before the epoch": "figure 8",
    "4: votes are acknowledgements": "ahead",
    "5: a resumption truncates": "resumption",
    "5: a rejected proposer goes on": "resumption",
    "6: by position alone": "version",
}
