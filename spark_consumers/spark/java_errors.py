"""What an exception of the JVM says of its cause, by the classes of itself and of what it was caused by.

A library says by the class of an exception what kind of trouble it has met: an argument that it refuses, a file that it cannot
parse, a connection that broke. Whether that is of one table or of the machine, one exception cannot prove. But most classes rule
out one of the two: `may_be_of_data`.
"""

from collections.abc import Sequence
from typing import Any, Final

#: The class of one exception and its superclasses, the nearest first.
Classes = Sequence[str]

#: Say nothing, and pass on what caused them. A subclass says more than these do.
_WRAPPERS: Final = frozenset(
    {
        "java.lang.RuntimeException",
        "java.io.UncheckedIOException",
        "java.lang.reflect.InvocationTargetException",
        "java.util.concurrent.CompletionException",
        "java.util.concurrent.ExecutionException",
        "org.apache.iceberg.exceptions.RuntimeIOException",
    }
)
#: Of what was given: a value, a name, a state of the table, or bytes that arrived and are none of their format.
_OF_DATA: Final = frozenset(
    {
        "java.lang.ArithmeticException",
        "java.lang.ClassCastException",
        "java.lang.IllegalArgumentException",
        "java.lang.IllegalStateException",
        "java.lang.IndexOutOfBoundsException",
        "java.lang.NullPointerException",
        "java.lang.UnsupportedOperationException",
        "java.time.DateTimeException",
        "java.util.NoSuchElementException",
        "org.apache.iceberg.exceptions.AlreadyExistsException",
        "org.apache.iceberg.exceptions.NoSuchIcebergTableException",
        "org.apache.iceberg.exceptions.NoSuchTableException",
        "org.apache.iceberg.exceptions.ValidationException",
    }
)
#: The same of classes that jars bring in packages of their own: the ends of their names.
_OF_BYTES: Final = (".avro.AvroRuntimeException", ".jackson.core.JsonProcessingException")
#: Subclasses of those above that say that somebody has ended the work.
_ENDED: Final = frozenset(
    {
        "java.nio.channels.ClosedSelectorException",
        "java.util.concurrent.CancellationException",
        "java.util.concurrent.RejectedExecutionException",
    }
)
#: Causes of causes that are looked at: more than libraries nest, and an end where an exception causes itself.
_DEEPEST: Final = 16


def may_be_of_data(chain: Sequence[Classes]) -> bool:
    """Whether it is possible that what the exception is about was at fault, and not the machine. Pure.

    `chain`: the exception's classes, then those of its cause, and so on. Only if every one of them is known to be raised for what
    was given (or is a mere wrapper), and one of them says so. Everything else is of the machine: that memory or threads are
    exhausted (the subclasses of `Error`), that a disk, a network or a service has failed (`IOException`, the exceptions of clients of
    stores), that a permission is missing, and *whatever is not known*. So a library with exceptions of its own can make a table's
    trouble pass for the machine's, as it was for all tables before, and never the other way round.
    """
    return bool(chain) and all(map(_is_harmless, chain)) and any(map(_is_of_data, chain))


def _is_harmless(classes: Classes) -> bool:
    return _is_of_data(classes) or (bool(classes) and classes[0] in _WRAPPERS)


def _is_of_data(classes: Classes) -> bool:
    if not _ENDED.isdisjoint(classes):
        return False
    return not _OF_DATA.isdisjoint(classes) or any(each.endswith(_OF_BYTES) for each in classes)


def chain_of(error: BaseException) -> list[list[str]]:
    """The classes of the exception of the JVM that this is, and those of its causes; none if it is another one."""
    # Of py4j; of PySpark, which turns some of them into its own.
    thrown: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    found: list[list[str]] = []
    try:
        while thrown is not None and len(found) < _DEEPEST:
            found.append(_classes(thrown.getClass()))
            thrown = thrown.getCause()
    except Exception:
        # The JVM does not answer any more.
        return []
    return found


def _classes(kind: Any) -> list[str]:
    found: list[str] = []
    while kind is not None:
        found.append(str(kind.getName()))
        kind = kind.getSuperclass()
    return found


def is_of_data(error: BaseException) -> bool:
    """Whether it is an exception of the JVM that may be of what was given (`may_be_of_data`)."""
    return may_be_of_data(chain_of(error))


def message_of(error: BaseException) -> str:
    """The class and the message of the exception of the JVM, in one line."""
    thrown: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    return " ".join(str(thrown.toString() if thrown is not None else error).split())[:300]
