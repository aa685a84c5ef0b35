"""Which errors of Iceberg's library suspend a table, and which make the round fail as a whole."""

import errno
import os

import pytest

from spark_consumers.lake.tables.doubt import is_convincing
from spark_consumers.spark.java_errors import chain_of, may_be_of_data

THROWABLE = ["java.lang.Throwable", "java.lang.Object"]
EXCEPTION = ["java.lang.Exception", *THROWABLE]
RUNTIME = ["java.lang.RuntimeException", *EXCEPTION]
ARGUMENT = ["java.lang.IllegalArgumentException", *RUNTIME]
NUMBER = ["java.lang.NumberFormatException", *ARGUMENT]
REFUSED = ["org.apache.iceberg.exceptions.ValidationException", *RUNTIME]
IO = ["java.io.IOException", *EXCEPTION]
ICEBERG_IO = [
    "org.apache.iceberg.exceptions.RuntimeIOException",
    "java.io.UncheckedIOException",
    *RUNTIME,
]
JSON = [
    "org.apache.iceberg.shaded.com.fasterxml.jackson.core.JsonParseException",
    "org.apache.iceberg.shaded.com.fasterxml.jackson.core.JsonProcessingException",
    *IO,
]
SERVICE = [
    "org.apache.iceberg.exceptions.ServiceUnavailableException",
    "org.apache.iceberg.exceptions.RESTException",
    *RUNTIME,
]
AWS = [
    "software.amazon.awssdk.core.exception.SdkClientException",
    "software.amazon.awssdk.core.exception.SdkException",
    *RUNTIME,
]
MEMORY = ["java.lang.OutOfMemoryError", "java.lang.VirtualMachineError", "java.lang.Error"]
LINKAGE = ["java.lang.NoSuchMethodError", "java.lang.LinkageError", "java.lang.Error"]
CANCELLED = [
    "java.util.concurrent.CancellationException",
    "java.lang.IllegalStateException",
    *RUNTIME,
]
SPARK = ["org.apache.spark.SparkException", *EXCEPTION]


@pytest.mark.parametrize(
    ("chain", "possible"),
    [
        ([REFUSED], True),
        ([NUMBER], True),
        # What was read is none of its format: the bytes have arrived.
        ([ICEBERG_IO, JSON], True),
        ([RUNTIME, ARGUMENT], True),
        # The store, the network, the disk: also where a library calls it an argument.
        ([IO], False),
        ([ICEBERG_IO, IO], False),
        ([ARGUMENT, IO], False),
        ([AWS], False),
        ([SERVICE], False),
        ([REFUSED, SERVICE], False),
        # The JVM and the session.
        ([MEMORY], False),
        ([RUNTIME, LINKAGE], False),
        ([CANCELLED], False),
        ([SPARK, ARGUMENT], False),
        # Nothing is said, or by nobody that is known.
        ([RUNTIME], False),
        ([["com.example.Odd", *RUNTIME]], False),
        ([[]], False),
        ([], False),
    ],
)
def test_a_class_that_may_be_of_a_machine_is_never_of_a_table(
    chain: list[list[str]], *, possible: bool
) -> None:
    assert may_be_of_data(chain) is possible


@pytest.mark.parametrize(
    ("failed", "passed", "convincing"),
    [(1, 1, True), (1, 0, False), (2, 1, False), (20, 20, True), (1000, 0, False), (0, 0, False)],
)
def test_tables_are_at_fault_only_if_as_many_others_pass(
    failed: int, passed: int, *, convincing: bool
) -> None:
    assert is_convincing(failed, passed) is convincing


def test_an_exception_of_python_has_no_classes_of_the_jvm() -> None:
    assert chain_of(OSError(errno.EIO, os.strerror(errno.EIO))) == []
    assert chain_of(ValueError("x")) == []
