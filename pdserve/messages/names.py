"""How the cluster's hash secret travels: only to members, and only to those who ask for it by id.

Everybody's card says by id which secret they hold; the id tells nothing of the secret itself.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["AskSecret", "HashSecret"]


class AskSecret(msgspec.Struct, frozen=True, array_like=True):
    """Give me the secret of this id."""

    names_id: Annotated[bytes, Meta(min_length=8, max_length=8)]


class HashSecret(msgspec.Struct, frozen=True, array_like=True):
    """The secret; empty if the one who was asked holds another one by now."""

    secret: Annotated[bytes, Meta(max_length=64)] = b""
