"""A base class for objects that a `with` block closes."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """An object that holds a connection or a file until `close`, or until its `with` block ends."""

    @abstractmethod
    def close(self) -> None:
        """Release its resources. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
