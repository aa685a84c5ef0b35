"""Parses walsender commands according to PostgreSQL's replication grammar. No I/O.

Source: PostgreSQL documentation, "Streaming Replication Protocol"; every form that clients of 11 to 18 send. A
command that PostgreSQL has and a server of WAL alone has not is a value too (`Unsupported`), so that its answer
can say so. Keywords have no case; a name without quotes is lower-cased, one in quotes is taken as it is.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from walsender_bridge.postgres.protocol.backend import SqlErrorReply
from walsender_bridge.postgres.protocol.lsn import Lsn, parse_lsn

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<lsn>[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8})(?![\w$])
      | (?P<number>[0-9]{1,20})(?![\w$])
      | (?P<word>[^\W\d][\w$]*)
      | "(?P<name>(?:[^"\0]|""){1,256})"
      | '(?P<text>(?:[^'\0]|''){0,1024})'
      | (?P<sign>[(),;.])
    )""",
    re.VERBOSE,
)
_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}")
_LARGEST_TIMELINE = 2**32 - 1
_TRUE, _FALSE = {"true", "on", "1"}, {"false", "off", "0"}
_OTHERS = {"BASE_BACKUP", "UPLOAD_MANIFEST", "ALTER_REPLICATION_SLOT"}


@dataclass(frozen=True, slots=True)
class IdentifySystem:
    """`IDENTIFY_SYSTEM`."""


@dataclass(frozen=True, slots=True)
class Show:
    """`SHOW name`."""

    name: str


@dataclass(frozen=True, slots=True)
class TimelineHistory:
    """`TIMELINE_HISTORY timeline`."""

    timeline: int


@dataclass(frozen=True, slots=True)
class CreateSlot:
    """`CREATE_REPLICATION_SLOT slot [TEMPORARY] PHYSICAL [RESERVE_WAL]`."""

    slot: str
    temporary: bool = False
    reserve_wal: bool = False


@dataclass(frozen=True, slots=True)
class ReadSlot:
    """`READ_REPLICATION_SLOT slot`."""

    slot: str


@dataclass(frozen=True, slots=True)
class DropSlot:
    """`DROP_REPLICATION_SLOT slot [WAIT]`."""

    slot: str
    wait: bool = False


@dataclass(frozen=True, slots=True)
class StartReplication:
    """`START_REPLICATION [SLOT slot] [PHYSICAL] lsn [TIMELINE timeline]`; timeline 0: the server's own."""

    slot: str | None
    lsn: Lsn
    timeline: int = 0


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A command that only PostgreSQL supports: another replication command, or SQL."""

    what: str


Command: TypeAlias = (
    IdentifySystem
    | Show
    | TimelineHistory
    | CreateSlot
    | ReadSlot
    | DropSlot
    | StartReplication
    | Unsupported
)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str


def parse(text: str) -> Command | None:
    """The command in `text`; None if there is nothing in it.

    Raises `SqlErrorReply`: 42601 for what the grammar does not have, 42602 for a slot name that no server takes.
    """
    first = re.match(r"\s*(\w*)", text)
    word = first[1].upper() if first else ""
    if word in _OTHERS:
        return Unsupported(word)
    if word not in _READERS:
        if text.strip(" \t\r\n;"):
            return Unsupported("SQL")
        return None
    reader = _CommandReader(_tokens(text))
    reader.word()
    command = _READERS[word](reader)
    reader.end()
    return command


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    position = 0
    stripped = text.rstrip()
    while position < len(stripped):
        match = _TOKEN.match(stripped, position)
        if match is None or match.lastgroup is None:
            raise _syntax(stripped[position : position + 20])
        tokens.append(_Token(match.lastgroup, match[match.lastgroup]))
        position = match.end()
    return tokens


class _CommandReader:
    """Reads the tokens of one command."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self._tokens = tokens
        self._at = 0

    def _next(self, *kinds: str) -> _Token | None:
        if self._at < len(self._tokens) and self._tokens[self._at].kind in kinds:
            self._at += 1
            return self._tokens[self._at - 1]
        return None

    def _fault(self) -> SqlErrorReply:
        rest = self._tokens[self._at : self._at + 1]
        return _syntax(rest[0].text if rest else "")

    def word(self, *, among: Sequence[str] = ()) -> str:
        """The next word in upper case if there is one (and it is `among` these), else ''."""
        before = self._at
        token = self._next("word")
        if token is None or (among and token.text.upper() not in among):
            self._at = before
            return ""
        return token.text.upper()

    def needed(self, word: str) -> None:
        if self.word(among=[word]) != word:
            raise self._fault()

    def name(self) -> str:
        token = self._next("word", "name")
        if token is None:
            raise self._fault()
        return token.text.replace('""', '"') if token.kind == "name" else token.text.lower()

    def slot(self) -> str:
        name = self.name()
        if _SLOT_NAME.fullmatch(name) is None:
            raise SqlErrorReply(
                "42602",
                f'replication slot name "{name[:80]}" is not valid',
                hint="It has 1 to 63 lower-case letters, digits and underscores.",
            )
        return name

    def lsn(self) -> Lsn:
        token = self._next("lsn")
        if token is None:
            raise self._fault()
        return parse_lsn(token.text)

    def number(self) -> int:
        token = self._next("number")
        if token is None:
            raise self._fault()
        return int(token.text)

    def timeline(self) -> int:
        number = self.number()
        if not 1 <= number <= _LARGEST_TIMELINE:
            raise SqlErrorReply("42601", f"invalid timeline {number}")
        return number

    def options(self) -> dict[str, str]:
        """`(name [value], ...)`, names in upper case, values in lower case; {} if there is no parenthesis."""
        found: dict[str, str] = {}
        if self._next("sign") is None:
            return found
        self._at -= 1
        self.sign("(")
        while True:
            name = self.word()
            value = self._next("word", "text", "number")
            if not name or name in found:
                raise self._fault()
            found[name] = value.text.lower() if value else "true"
            if not self.sign(",", must=False):
                self.sign(")")
                return found

    def sign(self, wanted: str, *, must: bool = True) -> bool:
        token = self._next("sign")
        if token is not None and token.text == wanted:
            return True
        if token is not None:
            self._at -= 1
        if must:
            raise self._fault()
        return False

    def end(self) -> None:
        self.sign(";", must=False)
        if self._at != len(self._tokens):
            raise self._fault()


def _identify(_: _CommandReader) -> Command:
    return IdentifySystem()


def _show(reader: _CommandReader) -> Command:
    name = reader.name()
    while reader.sign(".", must=False):
        name += f".{reader.name()}"
    return Show(name)


def _history(reader: _CommandReader) -> Command:
    return TimelineHistory(reader.timeline())


def _create(reader: _CommandReader) -> Command:
    slot = reader.slot()
    temporary = bool(reader.word(among=["TEMPORARY"]))
    if reader.word(among=["LOGICAL"]):
        # Its options are not checked, since logical slots are not supported here.
        raise _no_logical()
    reader.needed("PHYSICAL")
    if reader.word(among=["RESERVE_WAL"]):
        return CreateSlot(slot, temporary, reserve_wal=True)
    options = reader.options()
    reserve = options.pop("RESERVE_WAL", "false")
    if options or reserve not in _TRUE | _FALSE:
        raise _syntax(next(iter(options), reserve))
    return CreateSlot(slot, temporary, reserve_wal=reserve in _TRUE)


def _read(reader: _CommandReader) -> Command:
    return ReadSlot(reader.slot())


def _drop(reader: _CommandReader) -> Command:
    return DropSlot(reader.slot(), wait=bool(reader.word(among=["WAIT"])))


def _start(reader: _CommandReader) -> Command:
    slot = reader.slot() if reader.word(among=["SLOT"]) else None
    if reader.word(among=["LOGICAL"]):
        raise _no_logical()
    reader.word(among=["PHYSICAL"])
    lsn = reader.lsn()
    timeline = reader.timeline() if reader.word(among=["TIMELINE"]) else 0
    return StartReplication(slot, lsn, timeline)


_READERS = {
    "IDENTIFY_SYSTEM": _identify,
    "SHOW": _show,
    "TIMELINE_HISTORY": _history,
    "CREATE_REPLICATION_SLOT": _create,
    "READ_REPLICATION_SLOT": _read,
    "DROP_REPLICATION_SLOT": _drop,
    "START_REPLICATION": _start,
}


def _no_logical() -> SqlErrorReply:
    return SqlErrorReply(
        "0A000",
        "a safekeeper has no logical replication",
        hint="Make logical slots on the primary or on a standby.",
    )


def _syntax(near: str) -> SqlErrorReply:
    return SqlErrorReply("42601", f'syntax error at or near "{near[:40]}"')
