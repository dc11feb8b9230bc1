"""Names what the payloads of a directory are, so that no other worker takes them for its own.

Two workers may read each other's records only if their fingerprints are equal: model, hash secret,
layout, dtype, rank, block size.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Final

import msgspec

from pdserve.kv.tiers.disk.format import DTYPE_BYTES, SCALES_BYTES

__all__ = ["FINGERPRINT_BYTES", "Fingerprint"]

FINGERPRINT_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything that must be equal for a payload to mean the same."""

    content: str
    """`compat_hash` of the model: its weights and its KV."""
    secret_id: bytes
    """Id of the hash secret: with another secret, the names of the blocks differ."""
    block_bytes: int
    """Length of a full payload."""
    layout: str
    """Order of a block's items, as its engine names it."""
    dtype: str
    rank: int = 0
    ranks: int = 1
    """Tensor-parallel size. A rank's payload has that rank's heads only."""
    group: int = 0
    """Index of the group of layers, where layers have KV of several kinds."""
    scales: str = ""
    """Where the scales of a quantised dtype are; empty: it has none."""

    @property
    def id(self) -> bytes:
        """A digest of all fields."""
        return blake2b(self.packed(), digest_size=FINGERPRINT_BYTES).digest()

    def packed(self) -> bytes:
        """The fields as JSON, with sorted keys."""
        return msgspec.json.encode(
            asdict(self) | {"secret_id": self.secret_id.hex()}, order="sorted"
        )

    def check(self) -> None:
        """Errors: ValueError for fields that a record's header cannot hold."""
        for text, most in ((self.dtype, DTYPE_BYTES), (self.scales, SCALES_BYTES)):
            if not text.isascii() or len(text) > most:
                raise ValueError(f"{text!r} is longer than {most} characters, or not ASCII")

    @staticmethod
    def unpacked(data: bytes) -> Fingerprint:
        """The fingerprint in `packed` bytes. Errors: ValueError."""
        try:
            fields = msgspec.json.decode(data, type=dict[str, str | int])
            secret = bytes.fromhex(str(fields.pop("secret_id")))
            return msgspec.convert(fields | {"secret_id": secret}, Fingerprint)
        except (KeyError, msgspec.MsgspecError) as error:
            raise ValueError(f"no fingerprint: {error}") from None
