"""LSNs and WAL positions: text, order, and what is written of a position."""

import json
import pickle
from dataclasses import asdict, dataclass

import pytest

from walsender_bridge.errors import MalformedMessageError
from walsender_bridge.postgres.protocol.lsn import MAX_LSN, WalPosition, format_lsn, parse_lsn


@pytest.mark.parametrize(
    ("lsn", "text"),
    [(0, "0/0"), (0x16_B374_D848, "16/B374D848"), (1 << 32, "1/0"), (MAX_LSN, "FFFFFFFF/FFFFFFFF")],
)
def test_an_lsn_is_read_as_it_is_written(lsn: int, text: str) -> None:
    assert (format_lsn(lsn), parse_lsn(text)) == (text, lsn)


@pytest.mark.parametrize("text", ["", "16", "16/", "/1", "1/123456789", "x/1", "1/2/3", " 1/2"])
def test_another_text_is_no_lsn(text: str) -> None:
    with pytest.raises(MalformedMessageError, match="not an LSN"):
        parse_lsn(text)


def test_positions_are_in_the_order_of_one_servers_history() -> None:
    before, at_the_end, promoted = (
        WalPosition(1, 0x100),
        WalPosition(1, 0x200),
        WalPosition(2, 0x180),
    )
    assert before < at_the_end < promoted


def test_a_position_is_written_as_the_pair_that_it_replaces() -> None:
    @dataclass(frozen=True)
    class Record:
        confirmed_to: WalPosition

    position = WalPosition(timeline=3, lsn=0x16B3748)
    assert position == (3, 0x16B3748)
    assert hash(position) == hash((3, 0x16B3748))
    for written in (position, asdict(Record(position))["confirmed_to"]):
        assert json.dumps(written) == json.dumps((3, 0x16B3748)) == "[3, 23803720]"
    assert pickle.loads(pickle.dumps(position)) == position  # noqa: S301  # its own
