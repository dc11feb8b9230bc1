"""Computes chained block hashes: 128 bits for a block's tokens and everything before them.

    root   = BLAKE2b-128(key=secret, salt)
    hash_0 = BLAKE2b-128(key=secret, root   || tokens of block 0 as little-endian u32)
    hash_i = BLAKE2b-128(key=secret, hash_i-1 || tokens of block i)

Keyed BLAKE2b (RFC 7693) is a pseudo-random function: without the secret one cannot construct two
prefixes with one hash, so a tenant cannot aim at another tenant's blocks. The salt separates what
must never share blocks although the tokens agree: models, LoRA adapters, tenants.

Only full blocks have a hash. This file does not know where blocks are or what they contain, and it
does not choose the secret, which is fixed for a cluster's life.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from struct import iter_unpack
from typing import TYPE_CHECKING, NewType, cast

from pdserve import accel
from pdserve.token_ids import packed_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "HASH_BYTES",
    "HASH_SECRET_TEST",
    "SHORT_HASH_BYTES",
    "BlockHash",
    "block_hashes",
    "block_hashes_pure",
    "hash_secret_id",
    "joined_hashes",
    "pack_tokens",
    "prompt_root",
    "root_hash",
    "salt_owner",
    "short_hashes",
    "short_hashes_pure",
    "split_hashes",
]

BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 16
"""Length of a block hash: 128 bits, so that 2**40 blocks collide with probability below 2**-48."""

SHORT_HASH_BYTES = 8
"""Length of a short hash: the first bytes of a hash, read as a little-endian u64. Enough to find a
block in an index, where a collision (one pair in 2**64) costs a recomputation; never enough to
reuse a block's KV."""

HASH_SECRET_TEST = b"pdserve test and simulation only"
"""The secret of tests and simulation, public and constant so that their hashes repeat."""

_ROOT_TAG = b"pdserve root v1\0"
# This tag has the length of a parent hash, and equals one only with a chance of 1 in 2**128. So no
# salt of a tenant can be read as "parent || tokens".

_ABSENT = 0xFFFFFFFF


def root_hash(secret: bytes, *salt: str | None) -> BlockHash:
    """Return the parent hash of a sequence's first block.

    `salt` is positional (model, LoRA adapter, tenant, …); None and "" are different values, and no
    two lists of fields share an encoding because each carries its length.
    """
    message = bytearray(_ROOT_TAG)
    for field in salt:
        data = b"" if field is None else field.encode()
        message += (_ABSENT if field is None else len(data)).to_bytes(4, "little")
        message += data
    return BlockHash(blake2b(message, digest_size=HASH_BYTES, key=secret).digest())


def prompt_root(secret: bytes, model: str, cache_salt: str, lora: str = "") -> BlockHash:
    """Return the root of a request's hash chain; frontend and engine both use this.

    `model` is the compat hash, equal for all workers whose blocks may be exchanged. `lora` is the
    id of the LoRA adapter (`GenerateRequest.lora`), with its revision: other files make other KV.
    Empty: the model itself.
    """
    return root_hash(secret, model, lora or None, cache_salt or None)


def salt_owner(cache_salt: str) -> str:
    """Return who owns a cache salt: its part before a zero character. All salts of an isolated
    tenant have one owner; every other salt is its own."""
    return cache_salt.partition("\0")[0]


def block_hashes(
    tokens: Sequence[int], block_size: int, *, parent: bytes, secret: bytes
) -> list[BlockHash]:
    """Return the hashes of the full blocks in `tokens`; a partial last block has none.

    `parent` is `root_hash(...)` at the start of a sequence, else the hash of the block before.
    Linear in the tokens and, when native, without the GIL: call it from a thread for long prompts.
    Raises ValueError or OverflowError when an argument is out of range.
    """
    return split_hashes(joined_hashes(tokens, block_size, parent=parent, secret=secret))


def joined_hashes(tokens: Sequence[int], block_size: int, *, parent: bytes, secret: bytes) -> bytes:
    """Return `block_hashes` joined to one byte string, as messages carry them."""
    if type(tokens) is array:
        return _chain(packed_ids(tokens), block_size, secret, parent)
    if accel.NATIVE and isinstance(tokens, list | tuple):
        # Native code reads the tokens in place: packing them first takes as long as hashing them.
        return accel.native.block_hashes(tokens, block_size, secret, parent)
    return _chain(pack_tokens(tokens), block_size, secret, parent)


def split_hashes(joined: bytes) -> list[BlockHash]:
    """Split joined hashes into single ones."""
    # One cast covers all blocks: calling a NewType for each would cost as much as hashing it.
    return cast("list[BlockHash]", [digest for (digest,) in iter_unpack("16s", joined)])


def short_hashes_pure(hashes: bytes) -> bytes:
    """Pure-Python version of the native `short_hashes`."""
    if len(hashes) % HASH_BYTES:
        raise ValueError("hashes must be whole, 16 bytes each")
    return b"".join([head for (head,) in iter_unpack("8s8x", hashes)])


def hash_secret_id(secret: bytes) -> bytes:
    """Return 8 bytes that identify a secret and do not reveal it."""
    return blake2b(b"pdserve names v1", digest_size=SHORT_HASH_BYTES, key=secret).digest()


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Pack token ids as little-endian u32, the form that is hashed."""
    return bytes(packed_ids(tokens if type(tokens) is array else array("I", tokens)))


def block_hashes_pure(
    tokens: bytes | memoryview, block_size: int, secret: bytes, parent: bytes
) -> bytes:
    """Pure-Python version of the native `block_hashes`, with the same checks and results."""
    if block_size <= 0:
        raise ValueError("block_size must be positive")
    if not 0 < len(secret) <= blake2b.MAX_KEY_SIZE:
        raise ValueError("secret must hold 1 to 64 bytes")
    if len(parent) != HASH_BYTES:
        raise ValueError("parent must hold 16 bytes")
    packed = memoryview(tokens).cast("B")
    if len(packed) % 4:
        raise ValueError("tokens must be whole little-endian u32 values")
    keyed = blake2b(digest_size=HASH_BYTES, key=secret)
    step = block_size * 4
    digests = []
    for start in range(0, len(packed) - step + 1, step):
        # The key's own block is hashed once; each copy starts after it.
        state = keyed.copy()
        state.update(parent)
        state.update(packed[start : start + step])
        parent = state.digest()
        digests.append(parent)
    return b"".join(digests)


_chain = accel.native.block_hashes if accel.NATIVE else block_hashes_pure

short_hashes = accel.native.short_names if accel.NATIVE else short_hashes_pure
"""Returns the short hashes, joined, of joined hashes of 16 bytes each."""
