"""Random recorded schema changes between random changes of rows, drawn by hypothesis: followed in place, or copied for a known reason."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from spark_consumers.lake.tables.shape import changed
from tests.cluster.test_recorded_ddl_rows import copied, followed, install, rows_of, shape_of
from tests.support.servers import Database
from tests.support.slot_changes import PUBLICATION, changes_of

#: Types, with a value of each that is the same in JSON and in the lake, and the type that a column of it may be widened to.
TYPES = {
    "int2": ("7", "int4"),
    "int4": ("70000", "int8"),
    "int8": ("5000000000", None),
    "real": ("0.5", "float8"),
    "float8": ("0.25", None),
    "varchar(5)": ("'v'", "varchar(9)"),
    "varchar(9)": ("'varchar'", "text"),
    "text": ("'a text'", None),
    "numeric(6,2)": ("1.25", "numeric(9,2)"),
    "numeric(9,2)": ("1000.75", None),
}
#: What a table may be copied again for, and the changes for which each is expected.
REASONS = {
    "volatile": ("that the server does not keep", "its rows were rewritten"),
    "using": ("by a command that is not known to keep all values", "its rows were rewritten"),
    "array": ("that Iceberg cannot keep",),
    "swapped": ("was replaced by another of its name in one command",),
}


@dataclass
class Model:
    """A table `t` with a key `id`: what can be done with it, as SQL. `causes`: the changes so far that copy it."""

    draw: Any
    columns: dict[str, str] = field(default_factory=lambda: {"a": "int4", "b": "varchar(5)"})
    causes: set[str] = field(default_factory=set)
    last: int = 2
    next_name: int = 0

    def transaction(self) -> list[str]:
        several = range(self.draw(st.integers(1, 4)))
        made = [
            "BEGIN",
            *(self.rows() if self.draw(st.booleans()) else self.change() for _ in several),
        ]
        if self.draw(st.booleans()):
            kept = dict(self.columns), set(self.causes)
            undone = [self.change(), self.rows()]
            self.columns, self.causes = kept
            made += ["SAVEPOINT s", *undone, "ROLLBACK TO s", self.rows()]
        return [*made, "COMMIT"]

    def rows(self) -> str:
        some = self.draw(st.integers(1, self.last))
        match self.draw(st.sampled_from(("insert", "update", "delete"))):
            case "insert":
                self.last += 1
                return f"INSERT INTO t (id) VALUES ({self.last})"
            case "update" if self.columns:
                name = self.draw(st.sampled_from(sorted(self.columns)))
                value = self.draw(st.sampled_from((TYPES[self.columns[name]][0], "NULL")))
                return f"UPDATE t SET {name} = {value} WHERE id = {some}"
            case "update":
                return "SELECT 1"
        return f"DELETE FROM t WHERE id = {some}"

    def change(self) -> str:
        kinds = ["add", "default", "default", "copied"]
        if self.columns:
            kinds += ["rename", "drop", "widen", "widen"]
        kind = self.draw(st.sampled_from(kinds))
        if kind in {"rename", "drop", "widen"}:
            return getattr(self, kind)(self.draw(st.sampled_from(sorted(self.columns))))
        return getattr(self, kind)()

    def new_name(self) -> str:
        """A name that may have been another column's before."""
        self.next_name += 1
        free = [n for n in ("a", "b", "x") if n not in self.columns]
        return self.draw(st.sampled_from([*free, f"c{self.next_name}"]))

    def add(self) -> str:
        name, kind = self.new_name(), self.draw(st.sampled_from(sorted(TYPES)))
        self.columns[name] = kind
        return f"ALTER TABLE t ADD {name} {kind}"

    def default(self) -> str:
        name, kind = self.new_name(), self.draw(st.sampled_from(sorted(TYPES)))
        self.columns[name] = kind
        return f"ALTER TABLE t ADD {name} {kind} DEFAULT {TYPES[kind][0]}"

    def rename(self, old: str) -> str:
        new = self.new_name()
        self.columns[new] = self.columns.pop(old)
        return f"ALTER TABLE t RENAME {old} TO {new}"

    def drop(self, name: str) -> str:
        del self.columns[name]
        return f"ALTER TABLE t DROP {name}"

    def widen(self, name: str) -> str:
        wider = TYPES[self.columns[name]][1]
        if wider is None:
            return "SELECT 1"
        self.columns[name] = wider
        return f"ALTER TABLE t ALTER {name} TYPE {wider}"

    def copied(self) -> str:
        kind = self.draw(st.sampled_from(sorted(REASONS)))
        name = self.draw(st.sampled_from(sorted(self.columns))) if self.columns else ""
        if kind in {"using", "swapped"} and not name:
            return "SELECT 1"
        # Seldom: most examples are to be followed to their end.
        if self.draw(st.integers(0, 2)):
            return "SELECT 1"
        self.causes.add(kind)
        if kind == "using":
            value = TYPES[self.columns[name]][0]
            return f"ALTER TABLE t ALTER {name} TYPE {self.columns[name]} USING {value}"
        if kind == "swapped":
            return f"ALTER TABLE t DROP {name}, ADD {name} {self.columns[name]}"
        self.next_name += 1
        if kind == "array":
            return f"ALTER TABLE t ADD array{self.next_name} int[] DEFAULT '{{1}}'"
        return f"ALTER TABLE t ADD drawn{self.next_name} float8 DEFAULT random()"


def test_14_random_recorded_changes_are_followed_or_copied_for_a_known_reason(
    database: Database,
) -> None:
    counts = {"followed": 0, "copied": 0}
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    install(database)

    # Without its explanations, for which hypothesis traces every line, and without smaller examples, which take minutes.
    @settings(
        max_examples=25,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: Any) -> None:
        database.execute(
            "DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, a int, b varchar(5)); INSERT INTO t VALUES (1, 2, 'x'), (2, 3, NULL)",
            f"ALTER PUBLICATION {PUBLICATION} ADD TABLE t",
        )
        model = Model(data.draw)
        table, rows = copied(database), rows_of(database)
        with changes_of(database.dsn) as changes:
            statements = [
                s for _ in range(data.draw(st.integers(1, 3))) for s in model.transaction()
            ]
            note("\n".join(statements))
            database.execute(*statements)
            log = changes()
        found = followed(table, rows, log)
        if isinstance(found, str):
            counts["copied"] += 1
            expected = [reason for cause in model.causes for reason in REASONS[cause]]
            assert any(reason in found for reason in expected), found
            return
        counts["followed"] += 1
        rows, shape = found
        if changed(shape, shape_of(database)) is None:
            assert rows == rows_of(database)
        else:
            # A copy is due that only the catalog shows.
            assert model.causes

    run()
    print(counts)
    # How many are copied is drawn; each cause by itself is in test_recorded_ddl_rows.
    assert counts["followed"]
