"""Sampling noise as a pure function of seed and position: Philox4x32-10 in integer arithmetic.

    key     = (seed low 32 bits, seed high 32 bits)
    counter = (output position, choice index, prompt index, 0)
    uniform = top 52 of the first 64 output bits, divided by 2**52

No state, no generator, no device: batching, preemption, migration and another machine cannot
change the number a token is drawn with. (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011, whose published test vectors the tests repeat.)
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
"""32-bit words, held in 64 bits so that products do not overflow."""

Column = npt.ArrayLike
"""One integer per row."""

Seeds = npt.NDArray[np.uint64] | Iterable[int]

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10


def philox4x32(counter: Words, key: Words) -> Words:
    """`[4, n]` counters and `[2, n]` keys to `[4, n]` random words."""
    # Both multiplications of a round are one operation: with few rows, calls are what costs.
    even, odd = counter[0::2], counter[1::2]
    for _ in range(_ROUNDS):
        products = (_MULTIPLIERS * even)[::-1]
        even, odd = (products >> _HALF) ^ odd ^ key, products & _LOW
        key = (key + _WEYL) & _LOW
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniforms(
    seeds: Seeds, prompt_indices: Column, choices: Column, positions: Column
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row; seeds are taken modulo 2**64."""
    if not isinstance(seeds, np.ndarray):
        seeds = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64)
    counter = np.zeros((4, len(seeds)), np.uint64)
    counter[0], counter[1], counter[2] = positions, choices, prompt_indices
    words = philox4x32(counter & _LOW, np.stack((seeds & _LOW, seeds >> _HALF)))
    bits = (words[0] << np.uint64(20)) | (words[1] >> np.uint64(12))
    found: npt.NDArray[np.float64] = bits * 2.0**-52
    return found
