"""How a view's rows follow from the changes of its tables: the statements, as texts with placeholders. Pure.

A table's changes are a signed multiset: rows with `SIGN` 1 (added) or -1 (removed). The view's are, too, and are applied to its table
as those of any table without a key (`fold.multiset`).

**Joins.** With T the tables before the epoch and T' after it, the view's change is the sum over its tables k of the query with
T'(1..k-1), the changes of k, and T(k+1..): expanding T' = T + changes shows that all else cancels. In each term exactly one table has
signs, so a row's sign is that table's.

**Groups.** A group's row is a function of its *state*: the number of its rows, of each argument the count of values that are not NULL,
their sum, the least or greatest. Counts and sums change by those of the signed changes. An extreme does if nothing that was removed
reaches it; otherwise the group is computed again from the tables. A group without rows is gone, but for the one group of a query without
GROUP BY. States are stored in columns beside the view's own (`HIDDEN`), so nothing is lost with a process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from spark_consumers.lake.views.expressions import quoted
from spark_consumers.lake.views.sql_types import SqlType

#: The column with the sign of a change.
SIGN: Final = "_tuskline_sign"
#: What the names of stored states begin with.
HIDDEN: Final = "_tuskline_"
_SIGN: Final = quoted(SIGN)


@dataclass(frozen=True, slots=True)
class Item:
    """A column of a query's result: its name, its expression, its type."""

    name: str
    text: str
    type: SqlType

    @property
    def value(self) -> str:
        """The expression, with its type."""
        if self.type.kind.name == "OPAQUE":
            return self.text
        return f"CAST({self.text} AS {self.type.spark})"

    @property
    def selected(self) -> str:
        """As SELECT has it."""
        return f"{self.value} AS {quoted(self.name)}"


@dataclass(frozen=True, slots=True)
class Relation:
    """FROM and WHERE over the tables `{t0}`, `{t1}`, ... with these aliases."""

    text: str
    aliases: tuple[str, ...]

    def sign(self, changed: int) -> str:
        """The sign of the rows if the table of this number has signs."""
        return f"{quoted(self.aliases[changed])}.{_SIGN} AS {_SIGN}"


@dataclass(frozen=True, slots=True)
class Flat:
    """A projection of a relation."""

    relation: Relation
    items: tuple[Item, ...]

    @property
    def stored(self) -> str:
        """All rows, from `{t0}`, ..."""
        return f"SELECT {', '.join(i.selected for i in self.items)} {self.relation.text}"

    def term(self, changed: int) -> str:
        """The changes that follow from those of one table, which is in its place."""
        chosen = [*(i.selected for i in self.items), self.relation.sign(changed)]
        return f"SELECT {', '.join(chosen)} {self.relation.text}"


Rule = Literal["count", "sum", "min", "max", "other"]


@dataclass(frozen=True, slots=True)
class State:
    """A part of a group's state, of the argument in column `argument`. `full`: how it is aggregated from that. `type`: in Spark's SQL."""

    name: str
    rule: Rule
    argument: str
    full: str
    type: SqlType

    @property
    def changed(self) -> str:
        """By how much the changes change it; of an extreme, nothing (`Grouped.changed_groups`)."""
        value, zero = self.argument, f"CAST(0 AS {self.type.spark})"
        if self.rule == "count":
            text = f"sum(CASE WHEN {value} IS NULL THEN 0 ELSE {_SIGN} END)"
            # Without GROUP BY there is a row also where no row has changed.
            return f"coalesce(CAST({text} AS BIGINT), {zero}) AS {self.name}"
        made = f"CAST({value} AS {self.type.spark})"
        cases = f"WHEN {value} IS NULL THEN {zero} WHEN {_SIGN} > 0 THEN {made} ELSE - {made}"
        return f"coalesce(CAST(sum(CASE {cases} END) AS {self.type.spark}), {zero}) AS {self.name}"

    @property
    def merged(self) -> str:
        """The state after the changes, from that before (`v`) and from these (`d`)."""
        before = f"v.{quoted(HIDDEN + self.name)}"
        if self.rule in {"min", "max"}:
            best = "least" if self.rule == "min" else "greatest"
            return f"{best}({before}, d.`added_{self.name}`) AS {self.name}"
        zero = f"CAST(0 AS {self.type.spark})"
        return (
            f"CAST(coalesce({before}, {zero}) + d.{self.name} AS {self.type.spark}) AS {self.name}"
        )

    @property
    def is_reached(self) -> str:
        """Whether what was removed reaches the extreme, which is unknown then."""
        operator = "<=" if self.rule == "min" else ">="
        return f"coalesce(d.`removed_{self.name}` {operator} v.{quoted(HIDDEN + self.name)}, false)"


@dataclass(frozen=True, slots=True)
class Grouped:
    """A projection of groups of a relation.

    `groups`: the columns `g0`, ... with what is grouped by; `arguments`: `a0`, ... with what is aggregated. `items`: the result, from these
    and the states. `having`: a condition on it. `is_global`: there is one group, also without rows.
    """

    relation: Relation
    groups: tuple[Item, ...]
    arguments: tuple[Item, ...]
    states: tuple[State, ...]
    items: tuple[Item, ...]
    having: str = ""
    is_global: bool = False

    @property
    def hidden(self) -> tuple[Item, ...]:
        """The columns with the states."""
        found = [Item(HIDDEN + g.name, g.name, g.type) for g in self.groups]
        return (*found, *(Item(HIDDEN + s.name, s.name, s.type) for s in self.states))

    @property
    def query(self) -> str:
        """The rows, from `{t0}`, ..."""
        return self._result(self.items, self._states(self._base()))

    @property
    def stored(self) -> str:
        """The same with their states."""
        return self._result((*self.items, *self.hidden), self._states(self._base()))

    def term(self, changed: int) -> str:
        """What is grouped and aggregated of the changes that follow from those of one table, which is in its place."""
        chosen = [*self._base_items(), self.relation.sign(changed)]
        return f"SELECT {', '.join(chosen)} {self.relation.text}"

    @property
    def changed_groups(self) -> str:
        """How the states of groups change, from the changes `{u}`: with the extremes of what was added and removed."""
        groups = [g.name for g in self.groups]
        sums = [s.changed for s in self.states if s.rule not in {"min", "max"}]
        text = f"SELECT {_list([*groups, *sums])} FROM {{u}}{_by(groups)}"
        for state in (s for s in self.states if s.rule in {"min", "max"}):
            net = (
                f"SELECT {_list([*groups, f'{state.argument} AS x', f'sum({_SIGN}) AS n'])} FROM {{u}}"
                f" GROUP BY {_list([*groups, state.argument])}"
            )
            best = [
                f"{state.rule}(CASE WHEN n {sign} 0 THEN x END) AS `{what}_{state.name}`"
                for sign, what in ((">", "added"), ("<", "removed"))
            ]
            extremes = f"SELECT {_list([*groups, *best])} FROM ({net}){_by(groups)}"
            text = (
                f"SELECT d.*, e.`added_{state.name}`, e.`removed_{state.name}` FROM ({text}) AS d"
                f" JOIN ({extremes}) AS e ON {_same('d', 'e', groups)}"
            )
        return text

    @property
    def replaced(self) -> str:
        """The rows in the view's table `{v}` of the changed groups `{d}`, and the rows that take their place: `removed` and `added` in one.

        Each group comes twice, with either sign, so that both tables are read once.
        """
        stored = (*self.items, *self.hidden)
        before = [f"v.{quoted(item.name)} AS old{i}" for i, item in enumerate(stored)]
        states = [*(f"d.{g.name}" for g in self.groups), *(s.merged for s in self.states)]
        both = (
            f"SELECT {_list([*states, *before])}, explode(array(-1, 1)) AS {_SIGN}"
            f" FROM {{d}} AS d LEFT JOIN {{v}} AS v ON {self._of_view()}"
        )
        count = next(i for i, item in enumerate(stored) if item.name == HIDDEN + "n")
        living = "TRUE" if self.is_global else "n > 0"
        chosen = [
            f"CASE WHEN {_SIGN} < 0 THEN old{i} ELSE {item.value} END AS {quoted(item.name)}"
            for i, item in enumerate(stored)
        ]
        there = f"CASE WHEN {_SIGN} < 0 THEN old{count} IS NOT NULL ELSE {living} END"
        return f"SELECT {_list(chosen)}, {_SIGN} FROM ({both}) AS s WHERE {there}"

    @property
    def removed(self) -> str:
        """The rows in the view's table `{v}` of the changed groups `{d}`."""
        return f"SELECT {self._stored_names('v')}, -1 AS {_SIGN} FROM {{v}} AS v JOIN {{d}} AS d ON {self._of_view()}"

    @property
    def unknown(self) -> str:
        """The changed groups whose extremes are unknown; empty if no query has such."""
        reached = [s.is_reached for s in self.states if s.rule in {"min", "max"}]
        if not reached:
            return ""
        names = _list([f"d.{g.name}" for g in self.groups] or ["1 AS one"])
        some = " OR ".join(reached)
        return f"SELECT {names} FROM {{d}} AS d JOIN {{v}} AS v ON {self._of_view()} WHERE ({some})"

    @property
    def added(self) -> str:
        """The rows of the changed groups `{d}` as they are now, without the groups `{r}`, which are computed again."""
        names = [g.name for g in self.groups]
        states = _list([*(f"d.{name}" for name in names), *(s.merged for s in self.states)])
        return self._living(
            f"SELECT {states} FROM {{d}} AS d LEFT JOIN {{v}} AS v ON {self._of_view()}"
            f" LEFT ANTI JOIN {{r}} AS r ON {_same('d', 'r', names)}"
        )

    @property
    def again(self) -> str:
        """The rows of the groups `{r}`, computed from the tables `{t0}`, ..."""
        names = [g.name for g in self.groups]
        base = f"SELECT u.* FROM ({self._base()}) AS u LEFT SEMI JOIN {{r}} AS r ON {_same('u', 'r', names)}"
        return self._living(self._states(base))

    def _living(self, states: str) -> str:
        living = states if self.is_global else f"SELECT * FROM ({states}) AS l WHERE n > 0"
        text = self._result((*self.items, *self.hidden), living)
        return f"SELECT *, 1 AS {_SIGN} FROM ({text})"

    def _base_items(self) -> list[str]:
        return [item.selected for item in (*self.groups, *self.arguments)] or ["1 AS one"]

    def _base(self) -> str:
        return f"SELECT {_list(self._base_items())} {self.relation.text}"

    def _states(self, base: str) -> str:
        names = [g.name for g in self.groups]
        chosen = [*names, *(f"{s.full} AS {s.name}" for s in self.states)]
        return f"SELECT {_list(chosen)} FROM ({base}) AS b{_by(names)}"

    def _result(self, items: Sequence[Item], states: str) -> str:
        where = f" WHERE {self.having}" if self.having else ""
        return f"SELECT {_list([i.selected for i in items])} FROM ({states}) AS s{where}"

    def _stored_names(self, alias: str) -> str:
        return _list([f"{alias}.{quoted(i.name)}" for i in (*self.items, *self.hidden)])

    def _of_view(self) -> str:
        same = [f"d.{g.name} <=> v.{quoted(HIDDEN + g.name)}" for g in self.groups]
        return " AND ".join(same) or "TRUE"


def _list(parts: Sequence[str]) -> str:
    return ", ".join(parts)


def _by(names: Sequence[str]) -> str:
    return f" GROUP BY {_list(names)}" if names else ""


def _same(one: str, other: str, names: Sequence[str]) -> str:
    return " AND ".join(f"{one}.{name} <=> {other}.{name}" for name in names) or "TRUE"
