"""What status and doctor say of Delta logs."""

from spark_consumers.lake.delta_log.record import Behind, DeltaRecord
from walsender_bridge.observability.delta_view import line, summary, trouble

LEVEL = DeltaRecord(3)
LATE = DeltaRecord(3, {"s.b": Behind(4, 7, "the disk is full"), "s.a": Behind(None, 6, "it ends")})


def shown(record):
    """The summary of a record."""
    found = summary(record)
    assert found is not None
    return found


def test_28_logs_that_are_level_are_counted_and_no_trouble():
    assert summary(None) is None
    assert not trouble(None)
    assert not trouble(LEVEL)
    assert line(shown(LEVEL)) == "3 of 3 tables at their newest epoch"


def test_28_a_log_that_is_behind_is_named_with_its_epoch_and_the_reason():
    assert line(shown(LATE)) == "1 of 3 tables at their newest epoch; behind: s.a, s.b"
    assert trouble(LATE) == (
        "Delta logs do not show the newest epoch of 2 tables: s.a shows none of 6, because it ends;"
        " s.b shows epoch 4 of 7, because the disk is full"
    )


def test_28_a_sentence_names_five_tables():
    many = DeltaRecord(7, {f"s.{n}": Behind(1, 2, "it ends") for n in range(7)})
    assert trouble(many).endswith("s.4 shows epoch 1 of 2, because it ends; and 2 others")
