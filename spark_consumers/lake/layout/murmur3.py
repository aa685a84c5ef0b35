"""The hash of Iceberg's buckets: MurmurHash3, x86, 32 bits, seed 0, of many values at a time."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

UInt32s = npt.NDArray[np.uint32]
Int32s = npt.NDArray[np.int32]

_C1, _C2 = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)


def of_longs(values: npt.NDArray[np.int64]) -> Int32s:
    """The hashes of these numbers, as eight bytes each, the lowest first."""
    blocks = np.ascontiguousarray(values, "<i8").view("<u4").reshape(-1, 2)
    state = np.zeros(len(values), np.uint32)
    for i in range(2):
        state = _mixed(state, blocks[:, i])
    return _finished(state, np.full(len(values), 8, np.uint32))


def of_bytes(values: pa.Array) -> Int32s:
    """The hashes of these values, an array of `large_binary` without NULL."""
    offsets = np.frombuffer(values.buffers()[1], np.int64)[values.offset :][: len(values) + 1]
    buffer = values.buffers()[2]
    # Three bytes more, so that the last block can be read whole.
    content = np.zeros((0 if buffer is None else buffer.size) + 3, np.uint8)
    if buffer is not None:
        content[:-3] = np.frombuffer(buffer, np.uint8)
    begins, lengths = offsets[:-1], np.diff(offsets)
    state = np.zeros(len(values), np.uint32)
    order = np.argsort(-lengths, kind="stable")
    sizes = -lengths[order]
    for number in range(int(lengths.max(initial=0)) // 4):
        # Those that have a block of this number are the first ones.
        here = order[: np.searchsorted(sizes, -4 * (number + 1), "right")]
        state[here] = _mixed(state[here], _words(content, begins[here] + 4 * number))
    tails = (lengths % 4).astype(np.uint32)
    rest = np.flatnonzero(tails)
    words = _words(content, begins[rest] + lengths[rest] // 4 * 4)
    words &= (np.uint32(1) << (tails[rest] * np.uint32(8))) - np.uint32(1)
    state[rest] ^= _scrambled(words)
    return _finished(state, lengths.astype(np.uint32))


def _words(content: npt.NDArray[np.uint8], at: npt.NDArray[np.int64]) -> UInt32s:
    """The four bytes that begin at each of these places, as a number."""
    found = np.zeros(len(at), np.uint32)
    for i in range(4):
        found |= content[at + i].astype(np.uint32) << np.uint32(8 * i)
    return found


def _scrambled(words: UInt32s) -> UInt32s:
    return _rotated(words * _C1, 15) * _C2


def _mixed(state: UInt32s, words: UInt32s) -> UInt32s:
    return _rotated(state ^ _scrambled(words), 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _rotated(values: UInt32s, by: int) -> UInt32s:
    return (values << np.uint32(by)) | (values >> np.uint32(32 - by))


def _finished(state: UInt32s, lengths: UInt32s) -> Int32s:
    state = state ^ lengths
    state ^= state >> np.uint32(16)
    state *= np.uint32(0x85EBCA6B)
    state ^= state >> np.uint32(13)
    state *= np.uint32(0xC2B2AE35)
    state ^= state >> np.uint32(16)
    return state.view(np.int32)
