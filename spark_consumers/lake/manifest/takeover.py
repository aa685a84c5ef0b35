"""What a writer of the lake may do while another may have taken over: decisions and their order, without I/O.

The steps of a takeover, of a commit and of cleanup are generators: they yield effects (`Effect`) and receive the
answers, so that the pipeline and the explorer in the tests run the same steps. A writer can be suspended before any
effect for any time. What makes that harmless:

- A term belongs to one takeover for ever: its link is created exclusively. A takeover that loses its link tries again
  only if the newest link has a *lower* term; otherwise a newer writer exists, and this one gives way (`retries`).
  If the newest links are lost and given up, their terms are still in what their writers made: in the names of files and
  folders, and in the tables' branches. The next term is greater than these, too (`next_term`).
- Everything that a writer creates has its term in its name, and no name is used twice. A takeover removes what has a
  *lower* term and is in no link. Writers of lower terms cannot publish any more, so no later link can name it; what a
  newer writer creates has a higher term. It does not matter whether the writer was suspended before it acts.
- A table whose files are damaged is not taken, and stops no other one; nobody writes it before it is taken after all.
- Of many tables most are taken late (`TakeTable.later`). Until then an older writer that was suspended may go on there. It cannot change what
  readers see: it commits to its own branch, shows and tags what it had published before, which is what the newest link
  has of a table that nobody has written since, and drops snapshots that were in no link when it was the newest writer.
  Taking is a commit before any other one: an older writer removes files that were prepared in a table that is its own.
- Iceberg names its own files, without a term. Files that a dead writer prepared for a commit that never happened are
  listed *before* the takeover's commit, and removed after it if no snapshot has them: a newer writer commits to the
  table only after taking it over from us, which our commit would have detected.

None of this depends on a clock. Leases (`DriverWait`) only decide whether a takeover is attempted at all.
"""

import re
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from spark_consumers.lake.manifest import newest as newest_link
from walsender_bridge.errors import CorruptError, FencedError
from walsender_bridge.runtime import invariants
from walsender_bridge.runtime.invariants import Invariant

#: Tables that a takeover takes at once. Their branches show its term, should its link be lost before it has written anything.
AT_ONCE = 20
#: How often a commit is built again because somebody else committed to the table meanwhile.
ATTEMPTS = 20
#: Seconds after which a driver that gives no sign of life may be taken over.
LEASE = 15.0
#: The same where the lock on its sign is free, too, but locks there may be invisible from here: a few beats.
UNLOCKED_LEASE = 3.0
#: Seconds that pass between two looks, at most, as far as silence is concerned.
_LOOK = 2.0

_TERM = re.compile(r"%t(\d+)-[0-9a-f]+$|^\.?\d{20}-t(\d+)-a|^\.?(?:compacted|copy|skip)-t(\d+)-")
_COPY = re.compile(r"%t\d+-[0-9a-f]+$")
_LINK_DRAFT = re.compile(r"\.(\d{20})\.json\.")
_LINK = re.compile(r"^\.?(\d{20})-t")


class Link(newest_link.ChainLink, Protocol):
    """A link of the chain with its tables, as `chain.Manifest` is."""

    @property
    def versions(self) -> Iterable[Any]:
        """Its tables: `path` below the lake, `snapshot_id`, and `quarantine_files` and `index_files` below that path."""

    @property
    def written(self) -> Iterable[Any]:
        """Those of `versions` that a writer may come to write: not the tables that have left."""


# -- effects ----------------------------------------------------------------------------------------


class LeftoverKind(Enum):
    """What a writer may have left unfinished."""

    LINK_DRAFT = auto()
    STAGING = auto()
    TABLE = auto()
    QUARANTINE = auto()
    INDEX = auto()


#: What is needed or not by the links that are kept.
_OF_TABLES = {LeftoverKind.TABLE, LeftoverKind.QUARANTINE, LeftoverKind.INDEX}


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file or folder that may be garbage: its path below the lake, and the table that a file belongs to."""

    kind: LeftoverKind
    path: str
    table: str = ""


@dataclass(frozen=True, slots=True)
class ReadPublishedLink:
    """The newest link that a writer has recorded (`newest.PublishedLink`), or None."""


@dataclass(frozen=True, slots=True)
class ReadUsedTerm:
    """The greatest term in the names of files and folders and in the tables' branches; 0 if there is none."""


@dataclass(frozen=True, slots=True)
class ReadHead:
    """The newest link, or None."""


@dataclass(frozen=True, slots=True)
class ReadLinks:
    """All links that are in the chain."""


@dataclass(frozen=True, slots=True)
class ReadPinnedLinks:
    """The links of pinned epochs, by the newest link; None if that is not known, since a copy is damaged."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Create `link` after `after`. Answered by None, or by the term of the newest link if the number is taken."""

    link: Any
    after: Any


@dataclass(frozen=True, slots=True)
class TakeTable:
    """Have the table written by this term alone, from this snapshot on (`commit`, with `clean`).

    `later`: a table in which nothing is to be mended, whose readers see `snapshot`, may be taken before this writer's first
    commit to it instead, by a commit of its own. Answered by None, or by the damage that keeps it from being written.
    """

    path: str
    snapshot: int
    term: int
    epoch: int
    later: bool = False


@dataclass(frozen=True, slots=True)
class ListLeftovers:
    """Everything that a writer makes before it counts, as `Leftover`."""


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove it, if it is there."""

    left: Leftover


@dataclass(frozen=True, slots=True)
class ListPrepared:
    """The files in the table's metadata folder that may be of a commit that never came: drafts, and Iceberg's."""


@dataclass(frozen=True, slots=True)
class ReadTable:
    """The table's newest metadata."""


@dataclass(frozen=True, slots=True)
class LinkTable:
    """Make `made` the metadata after `base`, exclusively. Answered by whether it is."""

    base: Any
    made: Any


@dataclass(frozen=True, slots=True)
class ReadNamed:
    """Those of `files` that a snapshot of the table's newest metadata needs."""

    files: frozenset[str]


@dataclass(frozen=True, slots=True)
class RemovePrepared:
    """Remove this file, if it is there."""

    file: str


Effect = (
    ReadPublishedLink
    | ReadUsedTerm
    | ReadHead
    | ReadLinks
    | ReadPinnedLinks
    | Publish
    | TakeTable
    | ListLeftovers
    | Remove
    | ListPrepared
    | ReadTable
    | LinkTable
    | ReadNamed
    | RemovePrepared
)
_T = TypeVar("_T")
_L = TypeVar("_L", bound=Link)
Steps = Generator[Effect, Any, _T]


def carry_out(steps: Steps[_T], do: Callable[[Effect], Any]) -> _T:
    """Run the steps to their end, with `do` for each effect. Raises `InvariantError` before an effect that breaks one."""
    past = Past()
    try:
        effect = next(steps)
        while True:
            check_invariants(effect, past)
            answer = do(effect)
            past = past.after(effect, answer)
            effect = steps.send(answer)
    except StopIteration as end:
        result: _T = end.value
        return result


# -- what must hold before each effect --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Past:
    """What the effects so far were answered.

    The newest link, our own, the files that were asked about, those needed, and the greatest term that was used.
    """

    head: Link | None = None
    ours: Link | None = None
    asked: frozenset[str] = frozenset()
    needed: frozenset[str] = frozenset()
    used_term: int = 0

    def after(self, effect: Effect, answer: Any) -> "Past":
        """With one more effect, and its answer."""
        match effect:
            case ReadUsedTerm():
                return replace(self, used_term=answer)
            case ReadHead():
                return replace(self, head=answer)
            case Publish(link) if answer is None:
                return replace(self, ours=link)
            case ReadNamed(files):
                return replace(self, asked=files, needed=frozenset(answer))
        return self


class _Next(NamedTuple):
    effect: Effect
    past: Past


def check_invariants(effect: Effect, past: Past) -> None:
    """What a writer is about to do. Raises `InvariantError`."""
    invariants.check("lake writer", INVARIANTS, _Next(effect, past), _describe)


def _describe(found: _Next) -> str:
    past = found.past
    links = [
        f"{name} {'none' if link is None else f'{link.link} of term {link.term}'}"
        for name, link in (("newest link", past.head), ("own link", past.ours))
    ]
    return f"next is {type(found.effect).__name__}; {', '.join(links)}"


def _publishes_a_newer_term(found: _Next) -> bool:
    effect = found.effect
    if not isinstance(effect, Publish):
        return True
    link, after = effect.link, effect.after
    if link.term <= found.past.used_term:
        return False
    return after is None or bool(
        link.term > after.term and link.link > after.link and link.epoch >= after.epoch
    )


def _takes_under_its_own_term(found: _Next) -> bool:
    effect, past = found.effect, found.past
    if not isinstance(effect, TakeTable):
        return True
    ours = past.ours or past.head  # that of the last attempt is the newest still
    return ours is not None and (effect.term, effect.epoch) == (ours.term, ours.epoch)


def _removes_what_older_terms_left(found: _Next) -> bool:
    effect, head = found.effect, found.past.head
    if not isinstance(effect, Remove) or effect.left.kind is LeftoverKind.LINK_DRAFT:
        return True
    return head is not None and term_of(effect.left.path) < head.term


def _removes_what_no_snapshot_needs(found: _Next) -> bool:
    effect, past = found.effect, found.past
    return not isinstance(effect, RemovePrepared) or (
        effect.file in past.asked and effect.file not in past.needed
    )


INVARIANTS: tuple[Invariant[_Next], ...] = (
    Invariant(
        "takeover_publishes_a_newer_term",
        "a term belongs to one takeover; epochs never go back",
        _publishes_a_newer_term,
    ),
    Invariant(
        "table_is_taken_under_its_own_term",
        "Iceberg tables are fenced by the term that took the chain",
        _takes_under_its_own_term,
    ),
    Invariant(
        "only_older_terms_are_swept",
        "what a newer writer creates has a higher term",
        _removes_what_older_terms_left,
    ),
    Invariant(
        "only_unneeded_files_are_removed",
        "no file of a snapshot is removed",
        _removes_what_no_snapshot_needs,
    ),
)


# -- names ------------------------------------------------------------------------------------------


def folder_of(path: str, term: int, token: str) -> str:
    """The folder of a new copy: no other copy ever has it. `token` is hexadecimal, drawn for this one."""
    return f"{path}%t{term}-{token}"


def name_of(path: str) -> str:
    """The path that `folder_of` got; the path itself if it is no folder of a copy."""
    return _COPY.sub("", path)


def term_of(path: str) -> int:
    """The term in the name of what a writer made; 0 if there is none, as in lakes of earlier versions."""
    match = _TERM.search(path.rpartition("/")[2])
    return int(next(filter(None, match.groups()))) if match else 0


def greatest_term(names: Iterable[str]) -> int:
    """The greatest term in these names; 0 if none has one."""
    return max(map(term_of, names), default=0)


# -- the chain --------------------------------------------------------------------------------------


def next_term(newest: int, used: int) -> int:
    """The term of a takeover, the newest link being of term `newest`, and `used` the greatest in what writers made.

    Both are needed: links may be lost, and a writer may have made nothing but its link.
    """
    return max(newest, used) + 1


def retries(term: int, newest: int) -> bool:
    """Whether a takeover under `term` that lost its link is tried again, the newest link being of `newest`.

    A lower term's writer published once more before it was fenced. Any other has been taken over by a
    writer that came later than we did.
    """
    return newest < term


@dataclass(frozen=True, slots=True)
class Taken(Generic[_L]):
    """Our link, and what keeps tables (by path) from being written (`CorruptError`)."""

    head: _L
    damaged: dict[str, Any]


def take_over(
    propose: Callable[[_L | None, int], _L], ours: _L | None = None, decided: int | None = None
) -> Generator[Effect, Any, Taken[_L]]:
    """Fence every earlier writer, in the chain first and then in each table.

    `propose` makes the takeover's link after the head, under this term. `ours`: the link of this writer's last attempt, which failed
    behind it; while nobody has taken over since, it is gone on from. `decided`: the newest term when the takeover was
    decided on; a writer of a later one is not taken over, as nobody has looked whether it lives. Raises `FencedError` if a later writer came,
    `CorruptError` if links at the chain's end are lost: their numbers and terms may be another writer's still, and
    readers have seen their epochs.
    """
    while True:
        recorded = yield ReadPublishedLink()
        # Before the head: the terms of a driver that takes over after our look at it would have us take the lake back.
        used = yield ReadUsedTerm()
        before = yield ReadHead()
        if newest_link.is_lost(recorded, before):
            raise newest_link.lost(recorded, before, f"link {recorded.link}")
        if before is not None and ours is not None and before.term == ours.term:
            head = before
            break
        if decided is not None and before is not None and before.term > decided:
            raise overtaken(before.term)
        head = propose(before, next_term(before.term if before is not None else 0, used))
        newest = yield Publish(head, before)
        if newest is None:
            break
        if not retries(head.term, newest):
            raise overtaken(newest)
    damaged = {}
    # One that was brought level is in the folder of the table that it is to replace, which readers see: that one comes first.
    tables = {table.path: table for table in reversed([*head.written])}
    written = [table for table in head.written if tables[table.path] is table]
    for number, table in enumerate(written):
        later = number >= AT_ONCE
        damage = yield TakeTable(table.path, table.snapshot_id, head.term, head.epoch, later)
        if damage is not None:
            damaged[table.path] = damage
    return Taken(head, damaged)


def sweep(head: Link) -> Steps[None]:
    """Remove what writers of lower terms left unfinished; `head` is our takeover's link.

    Raises `FencedError` if a later writer has come by now, which only spares the work.
    """
    newest = yield ReadHead()
    if newest is None or newest.link != head.link:
        raise overtaken(newest.term if newest is not None else 0)
    # The chain first: an epoch is pinned while its link is in the chain, or by a pin that is there, and the link goes later.
    links = yield ReadLinks()
    pinned = yield ReadPinnedLinks()
    named = names_of([*links, *pinned], head) if pinned is not None else None
    for left in (yield ListLeftovers()):
        if is_garbage(left, head, named, below=head.term):
            yield Remove(left)


def names_of(links: Iterable[Link], head: Link) -> dict[str, set[str]]:
    """The table folders in these links, and for each its files of quarantined rows; of `head`, the row index, too.

    Only writers read the index, and they continue from the newest link.
    """
    named: dict[str, set[str]] = {}
    for link in links:
        for table in link.versions:
            named.setdefault(table.path, set()).update(table.quarantine_files)
    for table in head.versions:
        named.setdefault(table.path, set()).update(table.index_files)
    return named


def is_garbage(
    left: Leftover, head: Link, named: Mapping[str, Collection[str]] | None, *, below: int
) -> bool:
    """Whether nobody needs it, now or ever: of a term below `below`, and in no link (the index: not in `head`).

    `head` is a link of ours, `named` the names in the links that are kept (`names_of`); None: not known, and tables keep
    what they have.
    """
    if named is None and left.kind in _OF_TABLES:
        return False
    named = named or {}
    match left.kind:
        case LeftoverKind.LINK_DRAFT:
            number = _LINK_DRAFT.search(left.path)
            return number is not None and int(number[1]) <= head.link
        case LeftoverKind.STAGING:
            return term_of(left.path) < below
        case LeftoverKind.TABLE:
            # A folder without a term in its name is none of ours: a user's own table, or of an older version.
            return left.path not in named and 0 < term_of(left.path) < below
        case LeftoverKind.QUARANTINE | LeftoverKind.INDEX:
            # A table that no link names is being copied, or goes as a whole. What was made for a later link may be published
            # by now, though this writer does not know it.
            name = left.path.removeprefix(f"{left.table}/")
            files, link = named.get(left.table), _LINK.search(name.rpartition("/")[2])
            later = link is not None and int(link[1]) > head.link
            return not later and files is not None and name not in files and term_of(name) < below


def overtaken(term: int) -> FencedError:
    """The error of a writer that finds a newer one."""
    return FencedError(
        f"another writer has taken over, under term {term}",
        where="lake",
        repair="no action is needed: the newer writer continues",
    )


# -- one table --------------------------------------------------------------------------------------


def commit(
    change: Callable[[Any], Any], where: str, *, clean: bool = False
) -> Generator[Effect, Any, bool]:
    """Commit what `change` makes of the table, and again for as long as others come in between.

    `change` gets the table's newest metadata and returns the next, or None to leave it; it raises `FencedError`
    for a writer whose branch is gone. `clean`: remove what was prepared for commits that never came,
    which only a takeover may do. Returns whether something was committed. Raises `CorruptError` for a table to which
    nothing can be committed.
    """
    for _ in range(ATTEMPTS):
        # Before the table is read: what is there now was not made by a writer that comes after us.
        prepared: frozenset[str] = (yield ListPrepared()) if clean else frozenset()
        base = yield ReadTable()
        made = change(base)
        if made is None:
            return False
        if (yield LinkTable(base, made)):
            break
    else:
        # Of this table alone: as any other error it would end the epochs of all.
        raise CorruptError(
            f"gave up after {ATTEMPTS} attempts: other writers commit to this table",
            where=where,
            repair="let only Tuskline write to the lake's tables, and copy it again: tuskline table resync",
        )
    if prepared:
        needed = yield ReadNamed(prepared)
        for file in sorted(prepared - needed):
            yield RemovePrepared(file)
    return True


# -- whether to try ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sign:
    """A driver's sign of life as it was found.

    `term`: under which it writes, or tries to take over. `beat` changes for as long as it lives. `is_dead`:
    its process is known to be gone. `is_unlocked`: its lock is free, as far as can be seen from here.
    """

    term: int
    beat: bytes
    is_dead: bool = False
    is_unlocked: bool = False


@dataclass
class DriverWait:
    """Waits for a driver that is at work. Times are the caller's monotonic seconds; no two clocks are compared.

    A driver's silence is counted from look to look, and a pause between two counts for little: while this process was
    suspended, or the store did not answer, a living driver was not seen either.
    """

    lease: float = LEASE
    unlocked_lease: float = UNLOCKED_LEASE
    #: By name: the beat, and for how long it has not changed.
    _seen: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    _looked_at: float | None = None
    #: Those that were silent at the last look for as long as they are waited for: their signs say nothing until they change.
    silent: frozenset[str] = frozenset()

    def waits_for(self, term: int, signs: Mapping[str, Sign], now: float) -> str | None:
        """The driver that has the lake or is about to; None: a takeover may be tried.

        `term` is the newest link's, `signs` are those of all other drivers, by name, `now` is from before either was read.
        """
        passed = min(now - self._looked_at, _LOOK) if self._looked_at is not None else 0.0
        self._looked_at = now
        found, seen, silent = None, {}, set()
        for name, sign in signs.items():
            beat, silence = self._seen.get(name, (None, 0.0))
            silence = silence + passed if beat == sign.beat else 0.0
            seen[name] = sign.beat, silence
            lease = self.unlocked_lease if sign.is_unlocked else self.lease
            if silence >= lease:
                silent.add(name)
            elif not sign.is_dead and 0 < sign.term >= term:
                found = name
        self._seen, self.silent = seen, frozenset(silent)
        return found


def overtaken_signs(term: int, signs: Mapping[str, Sign]) -> list[str]:
    """The drivers whose claims are void, now that a link of `term` is published. Terms below it can publish nothing any more."""
    return [name for name, sign in signs.items() if 0 < sign.term < term]
