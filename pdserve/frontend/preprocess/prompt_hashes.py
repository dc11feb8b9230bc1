"""Computes the block hashes of a prompt, once for both the router and the worker.

A router uses them to find workers that cache the prompt's prefix; a worker uses them for its block
pool. They are optional: a frontend without the cluster's secret sends none and does not wait. Does
not know what is cached where. Owned by the frontend's service.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from pdserve.blocks.hashing import hash_secret_id, joined_hashes, prompt_root
from pdserve.blocks.image_hashes import image_block_hashes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.frontend.images.image_tokens import PromptView
    from pdserve.messages.card import ModelCard
    from pdserve.text.text_pool import TextWork

__all__ = ["NO_HASHING", "PromptHasher", "PromptHashes"]

_TOKENS_PER_CHAR: Final = 8
"""Tokens that count as one character to tokenize. Hashing takes 0.02 us a token, so up to 0.7 ms of
work run in place."""
_ROOTS: Final = 4096
"""Most cached roots of models, adapters and tenants; one takes 3 us to make."""


@dataclass(frozen=True, slots=True)
class PromptHashes:
    """The hashes of one prompt's full blocks, and the id of the secret they were made with."""

    id: bytes = b""
    hashes: bytes = b""
    """Joined hashes, 16 bytes each."""


_NONE: Final = PromptHashes()


class PromptHasher:
    """Computes block hashes with the cluster's secret."""

    def __init__(self, secret: Callable[[], bytes]) -> None:
        """`secret` returns the cluster's secret; empty while this node does not know it."""
        self._secret = secret

    async def of(
        self,
        card: ModelCard,
        salt: str,
        prompts: Sequence[Sequence[int]],
        pool: TextWork,
        *,
        lora: str = "",
    ) -> list[PromptHashes]:
        """The hashes of each prompt; those of long ones are computed in the pool.

        Args: `lora` is the id of the adapter that computes the prompts; empty: the model itself.

        Errors: `Overloaded`, `Draining` from the pool.
        """
        secret = self._secret()
        if not secret:
            return [_NONE] * len(prompts)
        work = sum(map(len, prompts)) // _TOKENS_PER_CHAR
        return await pool.run(work, _names, secret, card, salt, prompts, lora)

    async def of_view(
        self, card: ModelCard, salt: str, view: PromptView, pool: TextWork, *, lora: str = ""
    ) -> PromptHashes:
        """The hashes of a prompt with images, up to the first one of unknown size.

        Errors: as `of`.
        """
        secret = self._secret()
        if not secret:
            return _NONE
        work = len(view.tokens) // _TOKENS_PER_CHAR
        return await pool.run(work, _view_names, secret, card, salt, view, lora)

    def of_one(self, card: ModelCard, salt: str, prompt: Sequence[int]) -> PromptHashes:
        """The hashes of one prompt of the model itself, computed in place."""
        secret = self._secret()
        return _names(secret, card, salt, [prompt])[0] if secret else _NONE


def _names(
    secret: bytes, card: ModelCard, salt: str, prompts: Sequence[Sequence[int]], lora: str = ""
) -> list[PromptHashes]:
    id, root = _identity(secret, card.compat_hash, salt, lora)
    size = card.block_size
    return [
        PromptHashes(id, joined_hashes(prompt, size, parent=root, secret=secret))
        for prompt in prompts
    ]


def _view_names(
    secret: bytes, card: ModelCard, salt: str, view: PromptView, lora: str
) -> PromptHashes:
    id, root = _identity(secret, card.compat_hash, salt, lora)
    hashes = image_block_hashes(
        view.tokens, view.images, card.block_size, parent=root, secret=secret
    )
    return PromptHashes(id, hashes)


NO_HASHING: Final = PromptHasher(lambda: b"")
"""A hasher without a secret, which computes nothing."""


@lru_cache(maxsize=_ROOTS)
def _identity(secret: bytes, model: str, salt: str, lora: str) -> tuple[bytes, bytes]:
    return hash_secret_id(secret), prompt_root(secret, model, salt, lora)
