"""Defines how members fetch the cluster's hash secret, by its id.

Each node's card names the id of the secret it holds; the id reveals nothing of the secret.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["HashSecret", "HashSecretQuery"]


class HashSecretQuery(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the secret with this id."""

    names_id: Annotated[bytes, Meta(min_length=8, max_length=8)]


class HashSecret(msgspec.Struct, frozen=True, array_like=True):
    """The secret; empty if the answering node holds another one by now."""

    secret: Annotated[bytes, Meta(max_length=64)] = b""
