"""Bounds what Arrow allocates in this process.

A compressed record batch says how long it is, and Arrow allocates and fills that much before anything can look at the batch:
32 KB can become a gigabyte. Arrow has no setting for it, but its allocator has one: it takes no more than a given range of
addresses. What Arrow receives uncompressed is not allocated there. Older versions of the allocator ignore the setting
(pyarrow 18 does, 26 does not).

The allocator reads its settings when Arrow is loaded, so `limit` has to be called before anything imports it.
"""

import os
import sys
from typing import Final

#: No batch of this project is compressed; offsets that are not aligned are copied.
LIMIT_BYTES: Final = 256 << 20


def limit() -> None:
    """Bound Arrow's allocations to `LIMIT_BYTES`; each beyond them is an error of its call."""
    assert "pyarrow" not in sys.modules, "Arrow has read its settings"
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "mimalloc"
    os.environ["MIMALLOC_RESERVE_OS_MEMORY"] = f"{LIMIT_BYTES >> 20}MiB"
    os.environ["MIMALLOC_DISALLOW_OS_ALLOC"] = "1"
