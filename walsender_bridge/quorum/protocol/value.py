"""Values that are created for every commit: frozen for the type checker, and three times as fast to create.

A frozen dataclass sets each field through `object.__setattr__`: 0.6 us for five fields, 0.17 us without. At a dozen
values a commit that is a tenth of what the quorum adds to it.
"""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def value(cls: type[_T]) -> type[_T]:
    """A dataclass with slots that is compared and hashed by its fields, which are read-only for mypy."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
