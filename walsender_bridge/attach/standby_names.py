"""`synchronous_standby_names` as PostgreSQL reads it (docs, 19.6.2; syncrep_gram.y), and what it makes commits wait for.

Invariant of a quorum: nobody else can answer in the proposer's place. That holds when every name of the list has
to answer (`FIRST n` or `ANY n` with exactly n names, no `*`) and the proposer's is one of them. Names compare
without case, as the server compares them.

If the proposer is the only entry, the setting is `ANY 1`. After a change of proposers the server may have two
walsenders of that name, of which the older belongs to a connection that a partition has cut, and remains until
`wal_sender_timeout`. `FIRST 1` waits for the one in the lower slot of shared memory, which may be the older one;
`ANY 1` waits for whichever answers first, and each reports only what a quorum has. Beside other names `FIRST n`
stays: with `ANY n`, two walsenders of another standby could answer in the proposer's place.
"""

import re
from dataclasses import dataclass, replace
from typing import Self

from walsender_bridge.errors import MalformedMessageError

#: What matches every standby.
ANYBODY = "*"
_TOKEN = re.compile(r'\s*(?:("(?:[^"]|"")*")|([(),*])|([^\s"(),*]+))')
_PLAIN = re.compile(r"[a-z_][a-z0-9_$]*")
_METHODS = ("FIRST", "ANY")


@dataclass(frozen=True, slots=True)
class StandbyNames:
    """`number` of `names` have to answer, by `method`: the first that are there, or any. No names: nobody has to."""

    method: str = "FIRST"
    number: int = 0
    names: tuple[str, ...] = ()

    @classmethod
    def all_of(cls, *names: str, method: str = "FIRST") -> Self:
        """Each of them has to answer; one alone with any of its walsenders."""
        return cls("ANY" if len(names) == 1 else method, len(names), names)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The setting's value. Raises `MalformedMessageError` for what the server would not take."""
        tokens = _tokens(text)
        if not tokens:
            return cls()
        method, number = "FIRST", 1
        if tokens[-1] == ")":
            if tokens[0].upper() in _METHODS:
                method = tokens.pop(0).upper()
            if not tokens[0].isdecimal() or tokens[1] != "(":
                raise _malformed(text)
            number, tokens = int(tokens[0]), tokens[2:-1]
        names, between = tokens[::2], tokens[1::2]
        if len(names) == len(between) or set(between) - {","} or set(names) & {"(", ")", ","}:
            raise _malformed(text)
        return cls(method, number, tuple(map(_name, names)))

    def __str__(self) -> str:
        if not self.names:
            return ""
        return f"{self.method} {self.number} ({', '.join(map(_quoted, self.names))})"

    def names_it(self, name: str) -> bool:
        """Whether a standby of this name is in the list itself."""
        return name.lower() in (each.lower() for each in self.names)

    def needs(self, name: str) -> bool:
        """Whether no commit returns before a standby of this name has answered."""
        return self.needs_all and self.names_it(name)

    @property
    def needs_all(self) -> bool:
        """Whether every name has to answer."""
        return ANYBODY not in self.names and self.number == len(self.names)

    def joined_by(self, name: str) -> Self | None:
        """With a standby that has to answer as well; None when the language has no words for that."""
        if not self.needs(name) and (not self.needs_all or self.names_it(name)):
            return None
        if not self.names or self.needs(name):
            return self.all_of(*(self.names or (name,)), method=self.method)
        return replace(self, number=self.number + 1, names=(name, *self.names))

    def left_by(self, name: str) -> Self:
        """Without that standby, and whoever had to answer besides it still has to."""
        if ANYBODY in self.names:
            # It would go on to match the one that is to leave.
            return type(self)()
        left = tuple(each for each in self.names if each.lower() != name.lower())
        if not left:
            return type(self)()
        number = len(left) if self.needs_all else min(self.number, len(left))
        return replace(self, number=number, names=left)


def _tokens(text: str) -> list[str]:
    found, at, text = [], 0, text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _malformed(text)
        found.append(match[1] or match[2] or match[3])
        at = match.end()
    return found


def _name(token: str) -> str:
    return token[1:-1].replace('""', '"') if token.startswith('"') else token


def _quoted(name: str) -> str:
    if name == ANYBODY or (_PLAIN.fullmatch(name) and name.upper() not in _METHODS):
        return name
    return '"' + name.replace('"', '""') + '"'


def _malformed(text: str) -> MalformedMessageError:
    return MalformedMessageError(
        f"{text[:200]!r} is not a list of standbys",
        where="synchronous_standby_names",
        repair="write FIRST n (name, ...), ANY n (name, ...), or names alone",
    )
