"""Holds a prompt's token ids as packed u32: one type from the tokenizer to the engine's tensor.

An `array` has the length, slices and equality of a list. It takes 4 bytes per token, native code
and numpy read it in place, and messages carry its bytes. A list of Python integers takes 20 to 60
times as long to decode (`bench/results/frontend.md`). Do not change the ids of a request: several
owners share them.
"""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pdserve import accel

if TYPE_CHECKING:
    from collections.abc import Iterable

    TokenIds: TypeAlias = array[int]
else:
    TokenIds: TypeAlias = array

__all__ = ["TokenIds", "largest_id", "listed_ids", "packed_ids", "token_ids", "unpacked_ids"]

_SWAPPED: Final = sys.byteorder == "big"


def token_ids(ids: Iterable[int] = ()) -> TokenIds:
    """Packs ids. Raises `ValueError` for one that is no u32, and `TypeError` for one that is no
    integer."""
    try:
        return array("I", ids)
    except OverflowError:
        raise ValueError("a token id must be in [0, 2**32)") from None


def packed_ids(ids: object) -> bytes | memoryview:
    """The bytes of ids, little-endian u32; the hook of encoders, which asks for no other type.
    Raises `TypeError` for anything else."""
    if type(ids) is not array or ids.typecode != "I":
        raise TypeError(f"objects of type {type(ids).__name__} do not travel")
    if _SWAPPED:
        ids = ids[:]
        ids.byteswap()
    return memoryview(ids)


def listed_ids(ids: object) -> list[int]:
    """The ids as a list: the hook of encoders for nodes of releases that cannot read packed ids."""
    if type(ids) is not array or ids.typecode != "I":
        raise TypeError(f"objects of type {type(ids).__name__} do not travel")
    return ids.tolist()


def unpacked_ids(data: bytes) -> TokenIds:
    """The ids of `packed_ids`. Raises `ValueError` for bytes that are not whole ids."""
    if len(data) % 4:
        raise ValueError(f"packed token ids take 4 bytes each, not {len(data)} together")
    ids: TokenIds = array("I")
    ids.frombytes(data)
    if _SWAPPED:
        ids.byteswap()
    return ids


def _largest_id_pure(ids: Any) -> int:
    """Pure-Python version of the native `largest_id`."""
    return max(ids, default=0)


largest_id = accel.native.largest_id if accel.NATIVE else _largest_id_pure
"""Returns the largest of packed ids; 0 if there are none."""
