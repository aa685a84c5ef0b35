"""A DataFrame that is no one else's to Spark's cache."""

import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def apart(frame: "DataFrame") -> "DataFrame":
    """The same rows by a plan of its own.

    Spark knows what is cached by its plan, in all sessions of an application. Dropping a temporary view uncaches the plan of the
    view: without the condition, which the optimizer removes, that would be a DataFrame that a user has cached.
    """
    return frame.where(f"'{uuid.uuid4().hex}' IS NOT NULL")
