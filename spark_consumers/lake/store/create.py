"""How a record is created in a store whose answers get lost: decisions, without I/O.

The store creates an object if there is none of its name (`If-None-Match: *`), and exactly one of several such requests
creates it. But the one that asks may not get the answer: a timeout, a dropped connection, a 500 after the work was done. And
whatever repeats the request on the way (a client library, a proxy) gets "exists" as the answer to its own creation. So an
answer other than "created" says nothing, and what is there decides:

- What is read back is this writer's content: it is WON; another's: LOST. Either is final, since an object that exists is
  never replaced by a creation.
- Nothing is there: the request is repeated, with the same content. The first one may still be on its way; whichever of
  them arrives first, both are this writer's. "Exists" is followed by nothing there if the store refused two requests
  that met each other (409), or if somebody has removed the record since.
- Nothing is known for too long (`late`): UNKNOWN. The record may come to be even later.

Hence a content must be unique to its writer: with equal contents both would win.
"""

from dataclasses import dataclass
from enum import Enum, auto

#: Seconds of the first pause after a request without an answer, and of the longest one.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0


class Request(Enum):
    """What is asked of the store."""

    CREATE = auto()
    READ_BACK = auto()


class Answer(Enum):
    """What came back: the first two from CREATE, the next three from READ_BACK, the last from both."""

    CREATED = auto()
    EXISTS = auto()
    OWN = auto()
    ANOTHERS = auto()
    NOTHING = auto()
    NO_ANSWER = auto()


class Outcome(Enum):
    """How it ended."""

    WON = auto()
    LOST = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class Creation:
    """A creation under way: the next request, and how many have failed one after the other."""

    request: Request = Request.CREATE
    failures: int = 0

    @property
    def pause(self) -> float:
        """Seconds to wait before the request."""
        if not self.failures:
            return 0.0
        return min(_FIRST_PAUSE * 2.0 ** (self.failures - 1), _LONGEST_PAUSE)


def step(creation: Creation, answer: Answer, *, late: bool) -> Creation | Outcome:
    """What follows from the answer to the creation's request. `late`: the time for it is over."""
    match creation.request, answer:
        case Request.CREATE, Answer.CREATED:
            return Outcome.WON
        case Request.CREATE, Answer.EXISTS:
            return Creation(Request.READ_BACK, creation.failures)
        case Request.CREATE, Answer.NO_ANSWER:
            # Even when it is late: most answers are lost after the work was done.
            return Creation(Request.READ_BACK, creation.failures + 1)
        case Request.READ_BACK, Answer.OWN:
            return Outcome.WON
        case Request.READ_BACK, Answer.ANOTHERS:
            return Outcome.LOST
        case Request.READ_BACK, (Answer.NOTHING | Answer.NO_ANSWER) if late:
            return Outcome.UNKNOWN
        case Request.READ_BACK, Answer.NOTHING:
            return Creation(Request.CREATE, creation.failures + 1)
        case Request.READ_BACK, Answer.NO_ANSWER:
            return Creation(Request.READ_BACK, creation.failures + 1)
    raise AssertionError(f"{answer} is no answer to {creation.request}")
