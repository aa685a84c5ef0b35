"""Options of the data sources: read by name, checked, and never ignored when misspelt."""

import difflib
from collections.abc import Iterable, Mapping

from walsender_bridge.errors import UsageError


class Options:
    """What a user gave to `.option(...)`; names without regard to case, as Spark has it."""

    def __init__(self, source: str, given: Mapping[str, str], known: Iterable[str]) -> None:
        """Raises `UsageError` for a name that is not among `known`."""
        self._source = source
        self._given = {name.lower(): (name, value) for name, value in given.items()}
        names = {name.lower(): name for name in known}
        for lower, (name, _) in self._given.items():
            if lower not in names:
                near = difflib.get_close_matches(lower, names, n=1, cutoff=0.5)
                hint = f"did you mean {names[near[0]]!r}?" if near else ""
                raise UsageError(
                    f"{name!r} is not an option of format({source!r})",
                    repair=hint or f"the options are {', '.join(sorted(names.values()))}",
                )

    def wrong(self, name: str, what: str) -> UsageError:
        """The error for an option whose value is invalid."""
        return UsageError(f"option {name}: {what}", where=f"format({self._source!r})")

    def text(self, name: str) -> str | None:
        """The option's value, or None."""
        found = self._given.get(name.lower())
        return None if found is None else found[1]

    def required(self, name: str) -> str:
        """The option's value. Raises `UsageError` if it is not given."""
        value = self.text(name)
        if not value:
            raise UsageError(
                f"option {name} is missing",
                where=f"format({self._source!r})",
                repair=f".option({name!r}, ...)",
            )
        return value

    def names(self, name: str) -> tuple[str, ...] | None:
        """A comma-separated list, or None."""
        value = self.text(name)
        if value is None:
            return None
        found = tuple(part.strip() for part in value.split(",") if part.strip())
        if not found:
            raise self.wrong(name, "the list is empty")
        return found

    def number(self, name: str, *, least: int = 1) -> int | None:
        """A whole number, or None. Bytes may be written with k, m or g (1024)."""
        value = self.text(name)
        if value is None:
            return None
        body, factor = value.strip().lower(), 1
        body = body.removesuffix("b")
        if body and body[-1] in "kmg":
            factor = 1024 ** ("kmg".index(body[-1]) + 1)
            body = body[:-1]
        if not (body.isascii() and body.isdigit()):
            raise self.wrong(name, f"{value!r} is not a number")
        found = int(body) * factor
        if found < least:
            raise self.wrong(name, f"{found} is below {least}")
        return found

    def flag(self, name: str) -> bool | None:
        """`true` or `false`, or None."""
        value = self.text(name)
        if value is None:
            return None
        if value.strip().lower() not in ("true", "false"):
            raise self.wrong(name, f"{value!r} is neither true nor false")
        return value.strip().lower() == "true"
