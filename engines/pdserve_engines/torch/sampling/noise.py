"""Sampling noise as a pure function of seed and position: Philox4x32-10 in integer arithmetic.

    key     = (seed low 32 bits, seed high 32 bits)
    counter = (output position, choice index, prompt index, 0)
    uniform = top 52 of the first 64 output bits, divided by 2**52

No state, no generator, no device: batching, preemption, migration and another machine cannot
change the number a token is drawn with. (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011, whose published test vectors the tests repeat.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

Words = npt.NDArray[np.uint64]
"""32-bit words, held in 64 bits so that products do not overflow."""

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10


def philox4x32(counter: Words, key: Words) -> Words:
    """`[4, n]` counters and `[2, n]` keys to `[4, n]` random words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (right >> _HALF) ^ c1 ^ k0,
            right & _LOW,
            (left >> _HALF) ^ c3 ^ k1,
            left & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3))


def uniforms(
    seeds: Seq[int], prompt_indices: Seq[int], choices: Seq[int], positions: Seq[int]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row; seeds are taken modulo 2**64."""
    seed = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64)
    counter = np.zeros((4, len(seeds)), np.uint64)
    counter[0], counter[1], counter[2] = positions, choices, prompt_indices
    words = philox4x32(counter & _LOW, np.stack((seed & _LOW, seed >> _HALF)))
    bits = (words[0] << np.uint64(20)) | (words[1] >> np.uint64(12))
    found: npt.NDArray[np.float64] = bits * 2.0**-52
    return found
