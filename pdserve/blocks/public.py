"""Public block hashes: XXH3-64, as other systems name blocks, for comparing indexes and speeds.

    local_i    = XXH3-64(seed, tokens of block i as little-endian u32)
    sequence_0 = local_0
    sequence_i = XXH3-64(seed, sequence_i-1 || local_i as little-endian u64)

Whoever knows the seed can make two prefixes with one name. So these serve measurements only, and
nothing that pdserve stores or shares is named by them: that is `hashing`'s business.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from pdserve import accel
from pdserve.blocks.hashing import pack_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PUBLIC_SEED", "public_hashes", "public_pure", "xxh3_64"]

PUBLIC_SEED: Final = 1337
"""Of Dynamo."""

_MASK: Final = (1 << 64) - 1
_P32: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_P64: Final = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_MIX1: Final = 0x165667919E3779F9
_MIX2: Final = 0x9FB21C651E98DF25
_STRIPE: Final = 64
"""Bytes that are mixed into the eight lanes at a time."""
_STRIPES: Final = 16
"""Between two scrambles."""

_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578"
    "825ad07dccff7221b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea3"
    "71644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931"
    "c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def public_hashes(
    tokens: Sequence[int], block_size: int, seed: int = PUBLIC_SEED
) -> tuple[bytes, bytes]:
    """Of the full blocks in `tokens`: their own hashes, and those of the chain up to each; joined,
    8 bytes each, little-endian."""
    if accel.NATIVE:
        listed = tokens if isinstance(tokens, list | tuple) else pack_tokens(tokens)
        return accel.native.public_hashes(listed, block_size, seed)
    return public_pure(pack_tokens(tokens), block_size, seed)


def public_pure(tokens: bytes | memoryview, block_size: int, seed: int) -> tuple[bytes, bytes]:
    """The twin of the native `public_hashes`."""
    if block_size <= 0:
        raise ValueError("block_size must be positive")
    packed = bytes(memoryview(tokens).cast("B"))
    if len(packed) % 4:
        raise ValueError("tokens must be whole little-endian u32 values")
    step = 4 * block_size
    local = [
        xxh3_64(packed[start : start + step], seed)
        for start in range(0, len(packed) - step + 1, step)
    ]
    sequence = local[:1]
    for own in local[1:]:
        sequence.append(xxh3_64(struct.pack("<QQ", sequence[-1], own), seed))
    form = f"<{len(local)}Q"
    return struct.pack(form, *local), struct.pack(form, *sequence)


def xxh3_64(data: bytes, seed: int) -> int:
    """XXH3-64 of 4 bytes or more, after its specification (xxHash, doc/xxhash_spec.md)."""
    size = len(data)
    if size <= 8:
        return _upto8(data, seed)
    if size <= 16:
        return _upto16(data, seed)
    if size <= 128:
        return _upto128(data, seed)
    return _upto240(data, seed) if size <= 240 else _longer(data, seed)


def _u64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _fold(a: int, b: int) -> int:
    """Both halves of the 128-bit product, xored."""
    product = a * b
    return (product & _MASK) ^ (product >> 64)


def _avalanche(h: int) -> int:
    h ^= h >> 37
    h = h * _MIX1 & _MASK
    return h ^ (h >> 32)


def _rotated(x: int, by: int) -> int:
    return (x << by | x >> (64 - by)) & _MASK


def _mix16(data: bytes, at: int, secret: int, seed: int) -> int:
    low = _u64(data, at) ^ ((_u64(_SECRET, secret) + seed) & _MASK)
    high = _u64(data, at + 8) ^ ((_u64(_SECRET, secret + 8) - seed) & _MASK)
    return _fold(low, high)


def _upto8(data: bytes, seed: int) -> int:
    size = len(data)
    seed ^= int.from_bytes((seed & 0xFFFFFFFF).to_bytes(4, "little"), "big") << 32
    flip = ((_u64(_SECRET, 8) ^ _u64(_SECRET, 16)) - seed) & _MASK
    first, last = (int.from_bytes(part, "little") for part in (data[:4], data[-4:]))
    h = (last + (first << 32)) ^ flip
    h ^= _rotated(h, 49) ^ _rotated(h, 24)
    h = h * _MIX2 & _MASK
    h ^= (h >> 35) + size
    h = h * _MIX2 & _MASK
    return h ^ (h >> 28)


def _upto16(data: bytes, seed: int) -> int:
    size = len(data)
    flip1 = ((_u64(_SECRET, 24) ^ _u64(_SECRET, 32)) + seed) & _MASK
    flip2 = ((_u64(_SECRET, 40) ^ _u64(_SECRET, 48)) - seed) & _MASK
    low, high = _u64(data, 0) ^ flip1, _u64(data, size - 8) ^ flip2
    swapped = int.from_bytes(low.to_bytes(8, "little"), "big")
    return _avalanche((size + swapped + high + _fold(low, high)) & _MASK)


def _upto128(data: bytes, seed: int) -> int:
    size = len(data)
    total = size * _P64[0]
    for i in range((size - 1) // 32 + 1):
        total += _mix16(data, 16 * i, 32 * i, seed)
        total += _mix16(data, size - 16 * (i + 1), 32 * i + 16, seed)
    return _avalanche(total & _MASK)


def _upto240(data: bytes, seed: int) -> int:
    size = len(data)
    total = size * _P64[0] + sum(_mix16(data, 16 * i, 16 * i, seed) for i in range(8))
    total = _avalanche(total & _MASK)
    total += sum(_mix16(data, 16 * i, 16 * (i - 8) + 3, seed) for i in range(8, size // 16))
    total += _mix16(data, size - 16, 136 - 17, seed)
    return _avalanche(total & _MASK)


def _longer(data: bytes, seed: int) -> int:
    words = struct.unpack("<24Q", _SECRET)
    shifted = [(w - seed if i % 2 else w + seed) & _MASK for i, w in enumerate(words)]
    secret = struct.pack("<24Q", *shifted)
    size = len(data)
    lanes = [_P32[2], *_P64[:4], _P32[1], _P64[4], _P32[0]]
    for n in range((size - 1) // _STRIPE):
        _accumulate(lanes, data, _STRIPE * n, secret, 8 * (n % _STRIPES))
        if n % _STRIPES == _STRIPES - 1:
            for i, lane in enumerate(lanes):
                mixed = lane ^ (lane >> 47) ^ _u64(secret, 128 + 8 * i)
                lanes[i] = mixed * _P32[0] & _MASK
    _accumulate(lanes, data, size - _STRIPE, secret, 128 - 7)
    total = size * _P64[0]
    for i in range(0, 8, 2):
        low, high = _u64(secret, 11 + 8 * i), _u64(secret, 19 + 8 * i)
        total += _fold(lanes[i] ^ low, lanes[i + 1] ^ high)
    return _avalanche(total & _MASK)


def _accumulate(lanes: list[int], data: bytes, at: int, secret: bytes, key: int) -> None:
    for i in range(8):
        value = _u64(data, at + 8 * i)
        keyed = value ^ _u64(secret, key + 8 * i)
        lanes[i ^ 1] = (lanes[i ^ 1] + value) & _MASK
        lanes[i] = (lanes[i] + (keyed & 0xFFFFFFFF) * (keyed >> 32)) & _MASK
