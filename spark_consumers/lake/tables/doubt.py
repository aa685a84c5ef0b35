"""Whether an error that Iceberg's library, Spark or a REST catalog raises for a table is the table's own, or of what all tables share.

The library says what it has met, and not whose fault that is: it refuses an argument that was read from one table's metadata in
the same words as one from the session's settings, and a catalog has one status for a schema and for a wrong address. So the error is *doubted*, and evidence is collected: the step is repeated for
that table, and other tables are asked for.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, TypeVar

from spark_consumers.lake.concurrently import each
from spark_consumers.lake.format.table_format import TableFormat
from spark_consumers.lake.tables.fault import TableFault, fault_of
from spark_consumers.spark import java_errors
from walsender_bridge.errors import NotSupportedError, RefusedByCatalogError

#: How often a step fails for a table before the table is at fault.
ATTEMPTS: Final = 3
#: Seconds before the second attempt; twice as many before the third. A pool of connections that was closed is open by then.
_PAUSE: Final = 0.5
_DOUBTED: Final = "doubted"

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def is_convincing(failed: int, passed: int) -> bool:
    """Whether a step that has `failed` for some tables fails because of these, since it has `passed` for others. Pure.

    Two mistakes are possible. A table that is suspended without being at fault stays so until an operator acts; if an outage
    were taken for the fault of each table that it hits, that would be all of them. A table that is at fault and not suspended
    holds up the epochs of all others. So the tables are at fault only if all of this holds:

    - *Every class in the error is one that is raised for what was given* (`java_errors.may_be_of_data`), or a catalog has refused the
      request as it is: nothing in it is known to
      come from a disk, a network, a service or exhausted memory, and nothing is unknown. These stay the machine's, however
      often they come and whatever passes beside them: a store that answers half of the requests would otherwise convict, by
      chance, a few of many tables with each round.
    - *It comes `ATTEMPTS` times in a row*, seconds apart: what passes by itself is not worth an operator's time.
    - *After each attempt at least as many other tables pass as have failed* (and one at least): in the same step, or else by being
      opened anew, by the same library in the same session and from the same store. What tables share (a setting of the session,
      a version of a jar, a catalog) fails for most of them; then the round fails as a whole, and says so.

    A lake with a single table is therefore never suspended by this: no other table waits for it. Nor are two of three tables
    at once: the epochs wait, with the error of the first one, until the operator has repaired one of them, or paused it.
    """
    return passed >= max(1, failed)


def each_table(
    work: Sequence[tuple[str, _In]],
    function: Callable[[str, _In], _Out],
    others: Callable[[Collection[str], int], int],
    known: Callable[[str, Exception], TableFault | None] = fault_of,
    pause: Callable[[float], None] = time.sleep,
) -> list[tuple[str, Any]]:
    """`function` of each table's name and a value, several at a time: for each, `done` and what it returned, or its `fault`.

    `others`: how many tables but these pass now, up to a number. `known`: the faults that need no evidence. What is no table's
    fault is raised.
    """

    def attempt(name: str, value: _In) -> tuple[str, Any]:
        try:
            return "done", function(name, value)
        except Exception as error:
            if (fault := known(name, error)) is not None:
                return "fault", (fault.table, fault.error.to_wire())
            if not (isinstance(error, RefusedByCatalogError) or java_errors.is_of_data(error)):
                raise
            return _DOUBTED, error

    found = each(work, attempt)
    passed = sum(kind == "done" for kind, _ in found)
    for number in range(1, ATTEMPTS + 1):
        doubted = [place for place, (kind, _) in enumerate(found) if kind == _DOUBTED]
        if not doubted:
            break
        if passed < len(doubted):
            passed = others({work[place][0] for place in doubted}, len(doubted))
        if not is_convincing(len(doubted), passed):
            raise found[doubted[0]][1]
        if number == ATTEMPTS:
            for place in doubted:
                fault = _refused(work[place][0], found[place][1])
                found[place] = "fault", (fault.table, fault.error.to_wire())
            break
        pause(_PAUSE * number)
        for place, one in zip(doubted, each([work[i] for i in doubted], attempt), strict=True):
            found[place] = one
        passed = 0
    return found


def _refused(table: str, error: Exception) -> TableFault:
    if isinstance(error, RefusedByCatalogError):
        ways = f"{error.repair}; then tuskline table resume {table}, or copy the table again: tuskline table resync {table}"
        return TableFault(table, NotSupportedError(error.what, where=table, repair=ways))
    return TableFault(
        table,
        NotSupportedError(
            f"Iceberg's library refuses the table: {java_errors.message_of(error)}",
            where=table,
            repair=f"undo the change that the message names, then tuskline table resume {table}; or copy the table again: "
            f"tuskline table resync {table}",
        ),
    )


def passing(tables: TableFormat, paths: Iterable[str], most: int) -> int:
    """How many of these tables, in their folders, the library opens anew: up to `most`, and until one is refused."""
    found = 0
    for path in paths:
        if found == most or not tables.opens(path):
            break
        found += 1
    return found
