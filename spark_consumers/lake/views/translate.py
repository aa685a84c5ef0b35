"""A view's SQL, in PostgreSQL's dialect, as Spark's: parsed by sqlglot, resolved against the lake's tables. Pure.

What a query may consist of is listed here and in `expressions`; anything else is refused by name. The result is a multiset of rows, so
ORDER BY and LIMIT are refused. Whether the rows can be kept incrementally follows from the form of the query: one SELECT over tables and
inner joins, without HAVING, whose aggregates have a state that changes can be added to (`incremental`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise

import pyarrow as pa
from sqlglot import TokenType, exp, parse, tokenize
from sqlglot.errors import SqlglotError

from spark_consumers.decode.mode_columns import of_lake
from spark_consumers.lake.manifest.table_version import TableVersion
from spark_consumers.lake.views.expressions import (
    Column,
    Expressions,
    Typed,
    check_parts,
    fitted,
    name_of,
    quoted,
    refused,
)
from spark_consumers.lake.views.incremental import (
    HIDDEN,
    Flat,
    Grouped,
    Item,
    Relation,
    Rule,
    State,
)
from spark_consumers.lake.views.sql_types import (
    BOOL,
    EQUAL,
    FLOATS,
    INT8,
    INTEGERS,
    NUMERIC_TEXT,
    ORDERED,
    TEXT,
    Kind,
    SqlType,
    as_numeric,
    common,
    has_fixed_average,
    numeric,
    of_column,
    summed,
)
from walsender_bridge.errors import NotSupportedError
from walsender_bridge.postgres.protocol.pgoutput import Column as SentColumn
from walsender_bridge.postgres.protocol.relation_name import split_relation

#: Changes when views are computed otherwise: they are recomputed then.
_RULES = 1
#: Spark's function for `avg` (`spark_functions`).
AVERAGE = "tuskline_avg"
_SELECT = {"expressions", "from_", "joins", "where", "group", "having", "distinct", "with_", "kind"}
_TABLE = {"this", "db", "catalog", "alias"}
#: How PostgreSQL names the columns of those that sqlglot names otherwise.
_NAMES = {exp.LogicalAnd: "bool_and", exp.LogicalOr: "bool_or"}
_AGGREGATES = (exp.Count, exp.Sum, exp.Min, exp.Max, exp.Avg, exp.LogicalAnd, exp.LogicalOr)


@dataclass(frozen=True, slots=True)
class BaseTable:
    """A table that views may read: `stream.schema.table`, its schema and name, and its columns as the lake has them, with PostgreSQL's types."""

    full_name: str
    stream: str
    schema: str
    name: str
    layout: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class Translation:
    """A view in Spark's SQL.

    `tables`: the tables that `{t0}`, `{t1}`, ... stand for. `query`: the view's rows. `stored`: the same with the states of
    groups. `incremental`: how changes are applied; None: it is recomputed. `why`: the reason for either.
    """

    tables: tuple[str, ...]
    columns: pa.Schema
    hidden: tuple[str, ...]
    query: str
    stored: str
    incremental: Flat | Grouped | None
    why: str

    @property
    def digest(self) -> str:
        """The same as long as the view's rows are made in the same way."""
        text = repr((_RULES, self.tables, str(self.columns), self.stored, self.incremental))
        return blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class _Query:
    """A query and its columns. `form`: what may be kept incrementally; else `why` not."""

    text: str
    items: tuple[Item, ...]
    form: Flat | Grouped | None
    why: str


def base_tables(tables: Mapping[str, TableVersion]) -> dict[str, BaseTable]:
    """The tables of a link that views may read, by their names in the lake. One whose columns were never recorded is not among them."""
    found = {}
    for full, table in tables.items():
        stream, _, relation = (table.lake_name or full).partition(".")
        schema, name = split_relation(relation)
        if table.layout:
            # A column that is left out is not there, and a hash is a text. Deleted rows that are kept have their marks.
            sent = [SentColumn(*each, is_key=False) for each in table.layout]
            columns = of_lake(sent, table.masks, table.mode)
            layout = tuple((c.name, c.type_oid, c.typmod) for c in columns)
            found[full] = BaseTable(full, stream, schema, name, layout)
    return found


def parsed(sql: str) -> exp.Expression:
    """The one query in this text. Raises `NotSupportedError`."""
    try:
        tokens = tokenize(sql, dialect="postgres")
        found = [each for each in parse(sql, dialect="postgres") if each is not None]
    except (SqlglotError, ValueError) as error:  # The latter for parts that no node can have.
        line = str(error).partition("\n")[0]
        raise refused(f"the SQL cannot be read: {line}", "check the view's SQL with psql") from None
    for one, behind in pairwise(tokens):
        is_glued = behind.start == one.end + 1 and behind.text[:1].isidentifier()
        if one.token_type is TokenType.NUMBER and is_glued:
            # To sqlglot, `1_000` is 1 with the alias `_000`.
            raise refused(f"{one.text}{behind.text}: a number has decimal digits only in a view")
    if len(found) != 1 or not isinstance(found[0], exp.Select | exp.Union):
        raise refused("the SQL of a view must be one SELECT")
    return found[0]


def translate(sql: str, tables: Mapping[str, BaseTable]) -> Translation:
    """The view over these tables, by `stream.schema.table`. Raises `NotSupportedError` for what it may not contain."""
    try:
        return _translated(parsed(sql), tables)
    except RecursionError:
        raise refused("the SQL is nested too deeply", "divide it into several views") from None


def _translated(parsed: exp.Expression, tables: Mapping[str, BaseTable]) -> Translation:
    made = _Translator(tables)
    query = made.query(parsed, {})
    names = [item.name for item in query.items]
    for name in names:
        if sum(each.casefold() == name.casefold() for each in names) > 1:
            raise refused(
                f"two columns are named {name!r}", "give one of them another name with AS"
            )
        if name.startswith(HIDDEN):
            raise refused(f"column {name!r}: names that begin with {HIDDEN} are reserved")
    form = query.form
    hidden = form.hidden if isinstance(form, Grouped) else ()
    fields = [(item.name, item.type.in_arrow) for item in (*query.items, *hidden)]
    return Translation(
        tuple(made.tables),
        pa.schema(fields),
        tuple(item.name for item in hidden),
        query.text,
        query.text if form is None else form.stored,
        form,
        query.why,
    )


@dataclass
class _Translator:
    known: Mapping[str, BaseTable]
    tables: list[str] = field(default_factory=list)

    def query(self, node: exp.Expression, ctes: Mapping[str, exp.Expression]) -> _Query:
        """A SELECT or a UNION."""
        if isinstance(node, exp.Subquery | exp.Paren):
            check_parts(node, {"this", "alias"})
            return self.query(node.this, ctes)
        with_ = node.args.get("with_")
        if with_ is not None:
            if with_.args.get("recursive"):
                raise refused("WITH RECURSIVE: not supported in a view")
            for each in with_.expressions:
                if each.args["alias"].args.get("columns"):
                    raise refused(
                        f"{name_of(each.args['alias'].this)}: a WITH with names of columns"
                    )
                ctes = {**ctes, name_of(each.args["alias"].this): _with_ctes(each.this, ctes)}
        if isinstance(node, exp.Union):
            return self._union(node, ctes)
        if isinstance(node, exp.Select):
            return self._select(node, ctes)
        raise refused(f"{type(node).__name__.upper()}: not supported in a view")

    def _union(self, node: exp.Union, ctes: Mapping[str, exp.Expression]) -> _Query:
        check_parts(node, {"this", "expression", "distinct", "with_"})
        one, other = self.query(node.this, ctes), self.query(node.expression, ctes)
        if len(one.items) != len(other.items):
            raise refused("the parts of a UNION have different numbers of columns")
        items = [
            Item(a.name, quoted(a.name), common([a.type, b.type], "a UNION"))
            for a, b in zip(one.items, other.items, strict=True)
        ]
        sides = []
        for side in (one, other):
            cast = [
                Item(i.name, quoted(s.name), i.type).selected
                for i, s in zip(items, side.items, strict=True)
            ]
            sides.append(f"SELECT {', '.join(cast)} FROM ({side.text})")
        is_distinct = bool(node.args.get("distinct"))
        for item in items if is_distinct else ():
            _groupable(item.type, "UNION")
        word = "UNION" if is_distinct else "UNION ALL"
        return _Query(f"{sides[0]} {word} {sides[1]}", tuple(items), None, f"it is a {word}")

    # -- FROM -------------------------------------------------------------------------------------------

    def _source(
        self, node: exp.Expression, ctes: Mapping[str, exp.Expression]
    ) -> tuple[str, str, list[Column], bool]:
        """A source's text, alias, columns, and whether it is a table."""
        alias = node.args.get("alias")
        if alias is not None and alias.args.get("columns"):
            raise refused(f"{node.sql(dialect='postgres')}: an alias with columns is not supported")
        named = name_of(alias.this) if alias is not None and alias.this is not None else None
        if isinstance(node, exp.Table):
            check_parts(node, _TABLE)
            own = name_of(node.this)
            if not node.args.get("db") and own in ctes:
                return self._subquery(ctes[own], named or own, {})
            table = self._table(node)
            self.tables.append(table.full_name)
            alias_name = named or own
            columns = [Column(alias_name, n, of_column(t, m)) for n, t, m in table.layout]
            return f"{{t{len(self.tables) - 1}}} AS {quoted(alias_name)}", alias_name, columns, True
        if isinstance(node, exp.Subquery):
            check_parts(node, {"this", "alias"})
            if named is None:
                raise refused("a subquery in FROM needs an alias")
            return self._subquery(node.this, named, ctes)
        raise refused(f"{node.sql(dialect='postgres')[:60]}: not supported in FROM")

    def _subquery(
        self, node: exp.Expression, alias: str, ctes: Mapping[str, exp.Expression]
    ) -> tuple[str, str, list[Column], bool]:
        found = self.query(node, ctes)
        columns = [Column(alias, item.name, item.type) for item in found.items]
        return f"({found.text}) AS {quoted(alias)}", alias, columns, False

    def _table(self, node: exp.Table) -> BaseTable:
        name = name_of(node.this)
        schema = name_of(node.args["db"]) if node.args.get("db") else "public"
        stream = name_of(node.args["catalog"]) if node.args.get("catalog") else None
        found = [
            table
            for table in self.known.values()
            if (table.schema, table.name) == (schema, name) and stream in {None, table.stream}
        ]
        if not found:
            raise refused(
                f"the lake has no table {schema}.{name}",
                "check the name, and that the table is published: tuskline table list",
            )
        if len(found) > 1:
            streams = ", ".join(sorted(table.stream for table in found))
            raise refused(
                f"table {schema}.{name} is in several streams: {streams}",
                "write stream.schema.table",
            )
        return found[0]

    def _relation(
        self, node: exp.Select, ctes: Mapping[str, exp.Expression]
    ) -> tuple[Relation, tuple[Column, ...], str]:
        """FROM and WHERE, what can be named, and why changes do not pass through it (empty: they do)."""
        if node.args.get("from_") is None:
            raise refused("a view must read a table")
        text, alias, columns, is_table = self._source(node.args["from_"].this, ctes)
        text, aliases = f"FROM {text}", [alias]
        why = "" if is_table else "it has a subquery in FROM"
        has_comma = False
        for join in node.args.get("joins") or ():
            check_parts(join, {"this", "on", "kind", "side"})
            more, alias, its, is_table = self._source(join.this, ctes)
            if alias in aliases:
                raise refused(
                    f"the name {alias!r} is used twice in FROM", "give one of them another alias"
                )
            aliases.append(alias)
            columns = [*columns, *its]
            side, kind, on = join.side.upper(), join.kind.upper(), join.args.get("on")
            if kind not in {"", "INNER", "CROSS", "OUTER"} or side not in {
                "",
                "LEFT",
                "RIGHT",
                "FULL",
            }:
                raise refused(f"{side} {kind} JOIN: not supported in a view")
            if on is None and side:
                raise refused(f"{side} JOIN without ON: not supported in a view", "write ON")
            has_comma = has_comma or not (kind or side or on)
            if has_comma and side in {"RIGHT", "FULL"}:
                # In PostgreSQL, what is before the comma is no part of the join.
                raise refused(
                    f"{side} JOIN behind a comma in FROM", "write CROSS JOIN, or a subquery"
                )
            word = f"{side} JOIN" if side else "CROSS JOIN" if on is None else "JOIN"
            text += f" {word} {more}"
            if on is not None:
                text += f" ON {Expressions(tuple(columns)).condition(on)}"
            if side:
                why = why or "it has an outer join"
            if not is_table:
                why = why or "it has a subquery in FROM"
        where = node.args.get("where")
        if where is not None:
            text += f" WHERE {Expressions(tuple(columns)).condition(where.this)}"
        return Relation(text, tuple(aliases)), tuple(columns), why

    # -- SELECT -----------------------------------------------------------------------------------------

    def _select(self, node: exp.Select, ctes: Mapping[str, exp.Expression]) -> _Query:
        check_parts(node, _SELECT)
        relation, columns, why = self._relation(node, ctes)
        chosen = _expanded(node.expressions, columns)
        distinct = node.args.get("distinct")
        if distinct is not None and distinct.args.get("on"):
            raise refused("DISTINCT ON: not supported in a view")
        group = node.args.get("group")
        has_aggregates = any(_aggregates(each) for each, _ in chosen) or node.args.get("having")
        if group is None and not has_aggregates:
            made = Expressions(columns)
            items = tuple(_item(made.of(each), name) for each, name in chosen)
            if distinct is None:
                flat = Flat(relation, items)
                return _Query(
                    flat.stored,
                    items,
                    None if why else flat,
                    why or "a projection of tables and inner joins",
                )
            return _grouped(relation, items, why)
        found = _of_groups(node, chosen, relation, columns, why)
        if distinct is not None:
            for item in found.items:
                _groupable(item.type, "DISTINCT")
            return _Query(
                f"SELECT DISTINCT * FROM ({found.text})", found.items, None, "it has DISTINCT"
            )
        return found


def _with_ctes(node: exp.Expression, ctes: Mapping[str, exp.Expression]) -> exp.Expression:
    """The query of a WITH, in which earlier ones are known: their text takes the place of their names."""
    node = node.copy()
    for own in node.find_all(exp.CTE):
        if (hidden := name_of(own.args["alias"].this)) in ctes:
            raise refused(f"the name {hidden!r} is used twice in WITH", "give one another name")
    for table in list(node.find_all(exp.Table)):
        name = (
            name_of(table.this)
            if isinstance(table.this, exp.Identifier) and not table.args.get("db")
            else None
        )
        if name is not None and name in ctes:
            check_parts(table, _TABLE)
            alias = table.args.get("alias") or exp.TableAlias(this=table.this.copy())
            table.replace(exp.Subquery(this=ctes[name].copy(), alias=alias.copy()))
    return node


def _expanded(
    nodes: list[exp.Expression], columns: tuple[Column, ...]
) -> list[tuple[exp.Expression, str]]:
    """The expressions of a SELECT with the names of their columns, `*` as the columns that it stands for."""
    found: list[tuple[exp.Expression, str]] = []
    for node in nodes:
        of = node.args.get("table") if isinstance(node, exp.Column) else None
        star = node.this if isinstance(node, exp.Column) else node
        if isinstance(star, exp.Star):
            check_parts(star, set())
            wanted = [c for c in columns if of is None or c.table == name_of(of)]
            if not wanted:
                raise refused(f"{node.sql(dialect='postgres')[:60]}: FROM has no such table")
            found += [(_named(column), column.name) for column in wanted]
        elif isinstance(node, exp.Alias):
            found.append((node.this, name_of(node.args["alias"])))
        elif isinstance(node, exp.Column):
            found.append((node, name_of(node.this)))
        elif isinstance(node, _AGGREGATES):
            found.append((node, _NAMES.get(type(node), type(node).__name__.lower())))
        else:
            text = node.sql(dialect="postgres")[:60]
            raise refused(f"{text}: the column has no name", "give it one with AS")
    return found


def _named(column: Column) -> exp.Column:
    return exp.Column(
        this=exp.Identifier(this=column.name, quoted=True),
        table=exp.Identifier(this=column.table, quoted=True),
    )


def _item(found: Typed, name: str) -> Item:
    found = fitted(found, TEXT)
    return Item(name, found.text, found.type)


def _aggregates(node: exp.Expression) -> bool:
    return any(True for _ in node.find_all(exp.AggFunc))


def _groupable(kind: SqlType, what: str) -> None:
    if kind.kind not in EQUAL:
        raise refused(f"{what} compares {kind.name}")


# -- groups ---------------------------------------------------------------------------------------------


def _grouped(relation: Relation, chosen: tuple[Item, ...], why: str) -> _Query:
    """SELECT DISTINCT: the groups of all columns."""
    groups, items = [], []
    for number, item in enumerate(chosen):
        _groupable(item.type, "DISTINCT")
        groups.append(Item(f"g{number}", item.text, item.type))
        items.append(Item(item.name, f"g{number}", item.type))
    states = (_COUNT,)
    made = Grouped(relation, tuple(groups), (), states, tuple(items))
    why = why or _of_floats(groups)
    return _Query(
        made.query, made.items, None if why else made, why or "distinct rows, which are counted"
    )


def _of_floats(groups: list[Item]) -> str:
    return "it groups by a float" if any(g.type.kind in FLOATS for g in groups) else ""


_COUNT = State("n", "count", "1", "count(*)", INT8)


@dataclass
class _Aggregates:
    """The aggregates of a query, which are translated where they are found."""

    columns: tuple[Column, ...]
    groups: list[Item]
    arguments: dict[str, Item] = field(default_factory=dict)
    states: dict[tuple[str, str], State] = field(default_factory=dict)
    why: str = ""

    def __call__(self, node: exp.Expression) -> Typed | None:
        """What stands for this expression behind the grouping; None: its parts decide."""
        if isinstance(node, exp.Filter):
            check_parts(node, {"this", "expression"})
            if not isinstance(node.this, _AGGREGATES):
                raise refused(f"{node.sql(dialect='postgres')[:60]}: not supported in a view")
            return self._aggregate(node.this, self._plain().condition(node.expression.this))
        if isinstance(node, _AGGREGATES):
            return self._aggregate(node, "")
        if isinstance(node, exp.AggFunc | exp.Window):
            raise refused(f"{node.sql(dialect='postgres')[:60]}: not supported in a view")
        try:
            text = self._plain().of(node).text
        except NotSupportedError:
            if isinstance(node, exp.Column):
                raise
            return None
        for group in self.groups:
            if group.text == text:
                return Typed(group.name, group.type)
        if isinstance(node, exp.Column):
            raise refused(
                f"column {node.sql(dialect='postgres')} must be in GROUP BY or in an aggregate function"
            )
        return None

    def _plain(self) -> Expressions:
        return Expressions(self.columns)

    def _aggregate(self, node: exp.Expression, condition: str) -> Typed:
        check_parts(node, {"this", "big_int"})
        what = node.sql(dialect="postgres")[:60]
        argument = node.this
        is_distinct = isinstance(argument, exp.Distinct)
        if is_distinct:
            check_parts(argument, {"expressions"})
            if not isinstance(node, exp.Count) or len(argument.expressions) != 1:
                raise refused(f"{what}: DISTINCT is supported only in count, of one expression")
            argument = argument.expressions[0]
        if isinstance(argument, exp.Star):
            if not condition:
                return Typed("n", INT8)
            return Typed(
                self._state("count", Typed("1", SqlType(Kind.INT4)), condition, INT8).name, INT8
            )
        if argument is None:
            raise refused(f"{what} has no argument")
        if _aggregates(argument):
            raise refused(f"{what}: aggregate function calls cannot be nested")
        value = fitted(self._plain().of(argument), TEXT)
        if is_distinct:
            _groupable(value.type, what)
            self.why = self.why or "it has count(DISTINCT)"
            return Typed(self._other("count(DISTINCT {})", value, condition, INT8), INT8)
        if isinstance(node, exp.Count):
            return Typed(self._state("count", value, condition, INT8).name, INT8)
        if isinstance(node, exp.LogicalAnd | exp.LogicalOr):
            if value.type.kind is not Kind.BOOL:
                raise refused(f"{what}: {value.type.name} is not boolean")
            name = "bool_and" if isinstance(node, exp.LogicalAnd) else "bool_or"
            self.why = self.why or f"it has {name}"
            return Typed(self._other(name + "({})", value, condition, BOOL), BOOL)
        if isinstance(node, exp.Min | exp.Max):
            return self._extreme(
                "min" if isinstance(node, exp.Min) else "max", value, condition, what
            )
        return self._sum(node, value, condition, what)

    def _extreme(self, rule: Rule, value: Typed, condition: str, what: str) -> Typed:
        if value.type.kind not in ORDERED:
            raise refused(f"{what} depends on the order of {value.type.name}")
        if value.type.kind in FLOATS:
            self.why = self.why or "it has min or max of floats"
        return Typed(self._state(rule, value, condition, value.type).name, value.type)

    def _sum(self, node: exp.Expression, value: Typed, condition: str, what: str) -> Typed:
        if value.type.kind in FLOATS:
            raise refused(
                f"{what}: the sum of floats depends on their order",
                "cast them to numeric(p,s) at the source",
            )
        if value.type.kind not in {*INTEGERS, Kind.NUMERIC}:
            raise refused(f"{what}: not supported for {value.type.name}")
        if isinstance(node, exp.Avg) and not has_fixed_average(value.type):
            raise refused(
                f"{what}: its digits depend on the digits of each value",
                f"cast the argument to {value.type.name}",
            )
        count = self._state("count", value, condition, INT8).name
        scale = as_numeric(value.type).scale
        total = self._state("sum", value, condition, numeric(37, scale)).name
        if isinstance(node, exp.Avg):
            # PostgreSQL's numeric without limits, whose digits depend on the values: as text, as a column of that type.
            return Typed(f"{AVERAGE}(CAST({total} AS STRING), {count}, {scale})", NUMERIC_TEXT)
        kind = summed(value.type)
        return Typed(
            f"(CASE WHEN {count} = 0 THEN NULL ELSE CAST({total} AS {kind.spark}) END)", kind
        )

    def _argument(self, value: Typed, condition: str) -> str:
        text = f"(CASE WHEN {condition} THEN {value.text} END)" if condition else value.text
        if text not in self.arguments:
            self.arguments[text] = Item(f"a{len(self.arguments)}", text, value.type)
        return self.arguments[text].name

    def _state(self, rule: Rule, value: Typed, condition: str, kind: SqlType) -> State:
        argument = self._argument(value, condition)
        if rule == "sum":
            full = f"CAST(coalesce(sum(CAST({argument} AS {kind.spark})), CAST(0 AS {kind.spark})) AS {kind.spark})"
        else:
            full = f"{rule}({argument})"
        name = f"{rule}_{argument}"
        return self.states.setdefault((name, argument), State(name, rule, argument, full, kind))

    def _other(self, full: str, value: Typed, condition: str, kind: SqlType) -> str:
        argument = self._argument(value, condition)
        name = f"other{len(self.states)}"
        self.states[name, argument] = State(name, "other", argument, full.format(argument), kind)
        return name


def _of_groups(
    node: exp.Select,
    chosen: list[tuple[exp.Expression, str]],
    relation: Relation,
    columns: tuple[Column, ...],
    why: str,
) -> _Query:
    """A SELECT with GROUP BY or aggregates."""
    groups = _groups(node.args.get("group"), chosen, columns)
    found = _Aggregates(columns, groups)
    made = Expressions(columns, found)
    items = tuple(_item(made.of(each), name) for each, name in chosen)
    having = node.args.get("having")
    condition = made.condition(having.this) if having is not None else ""
    result = Grouped(
        relation,
        tuple(groups),
        tuple(found.arguments.values()),
        (_COUNT, *found.states.values()),
        items,
        condition,
        is_global=node.args.get("group") is None,
    )
    why = why or found.why or _of_floats(groups) or ("it has HAVING" if condition else "")
    return _Query(
        result.query, items, None if why else result, why or "groups of tables and inner joins"
    )


def _groups(
    node: exp.Group | None, chosen: list[tuple[exp.Expression, str]], columns: tuple[Column, ...]
) -> list[Item]:
    if node is None:
        return []
    check_parts(node, {"expressions"})
    found: list[Item] = []
    made = Expressions(columns)
    for each in node.expressions:
        wanted: exp.Expression = each
        if isinstance(each, exp.Literal) and not each.is_string:
            number = int(each.this) if each.is_int else 0
            if not 1 <= number <= len(chosen):
                raise refused(f"GROUP BY position {each.this} is not in the select list")
            wanted = chosen[number - 1][0]
        elif isinstance(each, exp.Column) and not each.args.get("table"):
            # As in PostgreSQL, a column of the tables goes before one of the result.
            name = name_of(each.this)
            outputs = [expression for expression, output in chosen if output == name]
            if not any(c.name == name for c in columns) and outputs:
                wanted = outputs[0]
        value = made.of(wanted)
        _groupable(value.type, "GROUP BY")
        if value.text not in {item.text for item in found}:
            found.append(Item(f"g{len(found)}", value.text, value.type))
    return found
