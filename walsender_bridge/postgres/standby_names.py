"""Parses `synchronous_standby_names` like PostgreSQL (docs, 19.6.2; syncrep_gram.y), and evaluates what commits wait for.

Invariant of a quorum: no other standby can acknowledge in the proposer's place. The server counts walsenders, not names, so only
one form guarantees that: the proposer's name alone (`alone`). Names are compared case-insensitively, as by the server.

If the proposer is the only entry, the setting is `ANY 1`. After a change of proposers the server may have two
walsenders of that name, of which the older belongs to a connection that a partition has cut, and remains until
`wal_sender_timeout`. `FIRST 1` waits for the one in the lower slot of shared memory, which may be the older one;
`ANY 1` waits for whichever answers first, and each reports only what a quorum has.

Beside other names the strongest form is `FIRST n` of n names, the proposer's first (`needs`): while it is attached, it
is one of the n. While it is not, n walsenders of the others answer without it: two of one name are enough for
`FIRST 2`. With `ANY n`, or with another name before the proposer's, they do so even while it is attached. No
setting excludes that, as the number of walsenders of a name has no limit, so `quorum.crowded` reports them.
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
    """`number` of `names` must acknowledge, chosen by `method`: the first ones attached, or any. No names: none must."""

    method: str = "FIRST"
    number: int = 0
    names: tuple[str, ...] = ()

    @classmethod
    def all_of(cls, *names: str) -> Self:
        """All of them must acknowledge, the first one whenever it is attached; a single name with any of its walsenders."""
        return cls("ANY" if len(names) == 1 else "FIRST", len(names), names)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the setting's value. Raises `MalformedMessageError` if the server would reject it."""
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
        """Whether every commit waits for a standby of this name as long as one is attached."""
        if not self.needs_all or not self.names_it(name):
            return False
        first = self.method == "FIRST" and self.names[0].lower() == name.lower()
        return len(self.names) == 1 or first

    def alone(self, name: str) -> bool:
        """Whether every commit waits for a standby of this name, attached or not."""
        return self.needs(name) and len(self.names) == 1

    @property
    def needs_all(self) -> bool:
        """Whether every name must acknowledge."""
        return ANYBODY not in self.names and self.number == len(self.names)

    def joined_by(self, name: str) -> Self | None:
        """Add a standby, in first place, that must acknowledge too; None if not all of the others must."""
        if not self.needs_all:
            return None
        own = [each for each in self.names if each.lower() == name.lower()] or [name]
        others = [each for each in self.names if each.lower() != name.lower()]
        return self.all_of(own[0], *others)

    def left_by(self, name: str) -> Self:
        """Remove a standby; the others that had to acknowledge still have to."""
        if ANYBODY in self.names:
            # It would still match the standby to be removed.
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
        f"invalid list of standbys {text[:200]!r}",
        where="synchronous_standby_names",
        repair="write FIRST n (name, ...), ANY n (name, ...), or names alone",
    )
