"""Defines LoRA adapters: as an engine loads them, and as a model's card lists them.

An adapter has a name, which clients ask for as they ask for a model, and a revision, which is a
hash of its files. Name and revision make its id. Requests, routers and block hashes use the id: the
same name with other files is another adapter. The worker reads the files and computes the revision
(`worker/lora.py`).
"""

from __future__ import annotations

import msgspec

__all__ = ["LoraAdapter", "LoraSummary", "lora_id"]


def lora_id(name: str, revision: str) -> str:
    """Returns the id of an adapter, as in `GenerateRequest.lora`."""
    return f"{name}@{revision}"


class LoraAdapter(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """An adapter that an engine is to load."""

    name: str
    """The name that clients ask for."""
    path: str
    """A local directory with `adapter_config.json` and the adapter's weights."""
    revision: str
    """Hash of the adapter's files, in hexadecimal digits."""
    rank: int = 0
    """Rank of its largest matrices (`r` of `adapter_config.json`); 0: unknown."""

    @property
    def id(self) -> str:
        """Equal to `GenerateRequest.lora` of the requests that use this adapter."""
        return lora_id(self.name, self.revision)


class LoraSummary(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """An adapter that a worker serves, as its card lists it."""

    name: str
    revision: str

    @property
    def id(self) -> str:
        """Equal to `LoraAdapter.id`."""
        return lora_id(self.name, self.revision)
