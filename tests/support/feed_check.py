"""A change feed applied to a table's rows: what it says, taken at its word."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

ABOUT = (
    *("_op", "_commit_lsn", "_xid", "_commit_time", "_version", "_offset", "_sequence"),
    *("_unchanged", "_unrepresentable"),
)


def frozen(value):
    return tuple(map(frozen, value)) if isinstance(value, list) else repr(value)


def bag_of(rows):
    """Rows (dicts) as a multiset."""
    return Counter(tuple(sorted((name, frozen(v)) for name, v in row.items())) for row in rows)


def rows_of(frame):
    return [row.asDict() for row in frame.collect()]


def changes_of(snapshot, feed, after=None):
    """The rows of a feed in their order; of epochs after this one."""
    frame = snapshot[feed]
    if after is not None:
        frame = frame.where(f"_version > {after}")
    rows = rows_of(frame)
    return sorted(
        rows, key=lambda r: (r["_version"], r["_offset"], r["_sequence"], r["_op"] == "update")
    )


@dataclass
class Applied:
    """The rows of a table, as its feed leads on from them. `key`: its columns; () for a table without one."""

    rows: list[dict[str, Any]]
    key: tuple[str, ...] = ()

    def __post_init__(self):
        self.held = {self._key(row): row for row in self.rows} if self.key else {}

    def _key(self, row):
        return tuple(frozen(row[name]) for name in self.key)

    def apply(self, changes):
        """Apply these changes, each of which has to fit to what is there."""
        moved = None
        for change in changes:
            op = change["_op"]
            row = {name: value for name, value in change.items() if name not in ABOUT}
            assert op != "begin", "the table is another one from here on"
            if op == "truncate":
                self.rows, self.held = [], {}
            elif self.key:
                moved = self._keyed(op, change, row, moved)
            elif op in {"delete", "update_before"}:
                same = next(
                    i for i, each in enumerate(self.rows) if bag_of([each]) == bag_of([row])
                )
                del self.rows[same]
            else:
                assert not change["_unchanged"]
                self.rows.append(row)
        if self.key:
            self.rows = list(self.held.values())
        return self

    def _keyed(self, op, change, row, moved):
        key = self._key(row)
        if op == "update_before":
            return self.held.pop(key)
        if op == "delete":
            del self.held[key]
            return None
        if op == "insert":
            assert key not in self.held
            assert not change["_unchanged"]
            self.held[key] = row
            return None
        before = moved if moved is not None else self.held.pop(key)
        self.held[key] = {
            name: before[name] if name in change["_unchanged"] else value
            for name, value in row.items()
        }
        return None
