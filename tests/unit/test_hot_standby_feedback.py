"""Many readers' hot standby feedback as one, against PostgreSQL's own rules for transaction ids."""

from hypothesis import example, given
from hypothesis import strategies as st

from walsender_bridge.quorum.protocol.hot_standby_feedback import oldest
from walsender_bridge.quorum.protocol.messages import HotStandbyFeedback

WRAP = 1 << 32
#: How far back ids are in use: beyond it a server stops, lest they wrap around.
HORIZON = (1 << 31) - 1


def is_normal(xid):
    """PostgreSQL's `TransactionIdIsNormal`."""
    return xid >= 3


def precedes(first, second):
    """PostgreSQL's `TransactionIdPrecedes`, of two normal ids: the sign of their difference in 32 bits."""
    return (first - second) % WRAP > WRAP // 2


def as_sent(next_xid, xid):
    """Id and epoch, as a walreceiver sends them (`XLogWalRcvSendHSFeedback`)."""
    epoch, low = divmod(next_xid, WRAP)
    return xid, epoch - 1 if low < xid else epoch


@st.composite
def servers(draw):
    """The server's next transaction, as a number of 64 bits, and two ids of each reader; those below 3 name none."""
    near = st.integers(-5, 5).map(lambda more: 7 * WRAP + more)
    next_xid = draw(near | st.integers(WRAP, 9 * WRAP))
    back = st.integers(0, 9) | st.integers(0, HORIZON)
    used = back.map(lambda ago: (next_xid - ago) % WRAP)
    xids = used | st.integers(0, 2)
    return next_xid, draw(st.lists(st.tuples(xids, xids), max_size=6))


def first_by_circle(xids):
    """The id that precedes all others; 0: none is normal."""
    found = 0
    for xid in xids:
        if is_normal(xid) and (not found or precedes(xid, found)):
            found = xid
    return found


@given(servers())
@example((2 * WRAP + 500, [(4_000_000_000, 2), (500, 77), (1, 4_294_967_295)]))
def test_the_oldest_is_the_one_that_precedes_all_others(server):
    next_xid, readers = server
    sent = [HotStandbyFeedback(*as_sent(next_xid, x), *as_sent(next_xid, c)) for x, c in readers]
    found = oldest(sent)
    for xid, epoch, all_xids in (
        (found.xmin, found.xmin_epoch, [x for x, _ in readers]),
        (found.catalog_xmin, found.catalog_xmin_epoch, [c for _, c in readers]),
    ):
        expected = first_by_circle(all_xids)
        assert xid == expected
        assert (xid, epoch) == (as_sent(next_xid, expected) if expected else (0, 0))


@given(servers())
def test_the_oldest_of_parts_is_the_oldest_of_all(server):
    """Safekeepers each take it over their readers, and the proposer over the safekeepers."""
    next_xid, readers = server
    sent = [HotStandbyFeedback(*as_sent(next_xid, x), *as_sent(next_xid, c)) for x, c in readers]
    parts = [oldest(sent[:2]), oldest(sent[2:3]), oldest(sent[3:])]
    assert oldest(parts) == oldest(sent)


def test_an_id_that_is_no_transaction_hides_nobodys():
    for special in (0, 1, 2):
        sent = [HotStandbyFeedback(special, 0, special, 0), HotStandbyFeedback(700, 1, 600, 1)]
        assert oldest(sent) == sent[1]
        assert oldest(sent[:1]) == HotStandbyFeedback()
