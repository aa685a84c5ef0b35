"""Deletion vectors inside a Delta log. Pure.

A blob of Iceberg's type `deletion-vector-v1` contains a deletion vector in Delta's own format, between a length and a checksum. Delta's
protocol also has vectors in files, but only in files that begin with a version byte, which a Puffin file does not: delta-kernel
refuses it. So the log has the vector itself, in the encoding Z85.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

_ALPHABET: Final = np.frombuffer(
    b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#",
    np.uint8,
)
_BASE, _DIGITS, _WORD = 85, 5, 4
#: The bytes of a blob before and behind what Delta has, too: its length and its CRC.
_LENGTH = _CRC = 4


def descriptor(blob: bytes, rows: int) -> Mapping[str, Any]:
    """The `deletionVector` of an `add` action for the vector in this blob (`puffin.encode`), which removes so many rows."""
    content = blob[_LENGTH:-_CRC]
    return {
        "storageType": "i",
        "pathOrInlineDv": z85(content),
        "sizeInBytes": len(content),
        "cardinality": rows,
    }


def z85(content: bytes) -> str:
    """The bytes in Z85 (ZeroMQ RFC 32), padded with zeros to whole words; their number is recorded beside them."""
    words = np.frombuffer(content + bytes(-len(content) % _WORD), ">u4").astype(np.uint32)
    digits = np.empty((len(words), _DIGITS), np.uint8)
    for place in reversed(range(_DIGITS)):
        words, digits[:, place] = np.divmod(words, np.uint32(_BASE))
    return _ALPHABET[digits].tobytes().decode()
