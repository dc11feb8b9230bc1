"""Remembers how many tokens images take, and what a prompt looks like with them.

Only the engine's processor knows how many tokens an image becomes, and that depends on the image's
size. Workers tell it with the first token of each answer (`FirstTokenStats.image_tokens`). A size
that took different numbers is not guessed any more. Pure; owned by the frontend's service.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.blocks.image_hashes import IMAGE_FILLER, PlacedImage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import TokenId

__all__ = ["ImageTokens", "LoadedImage", "PromptView", "view_of"]

_MOST: Final = 65_536
"""Most sizes that are remembered, over all models; one takes 200 bytes."""


@dataclass(frozen=True, slots=True)
class LoadedImage:
    """One image of a request: checked, and not decoded."""

    data: bytes
    """The file."""
    digest: bytes
    width: int
    height: int


class ImageTokens:
    """How many tokens images of a size take, by model."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._known: OrderedDict[tuple[str, int, int], int] = OrderedDict()
        """(compat hash, width, height) -> tokens; 0: they vary."""

    def __len__(self) -> int:
        return len(self._known)

    def expected(self, model: str, images: Sequence[LoadedImage]) -> tuple[int, ...]:
        """Tokens of each image; 0: unknown. `model` is the card's compat hash."""
        found = []
        for image in images:
            key = (model, image.width, image.height)
            if key in self._known:
                self._known.move_to_end(key)
            found.append(self._known.get(key, 0))
        return tuple(found)

    def learn(self, model: str, images: Sequence[LoadedImage], tokens: Sequence[int]) -> None:
        """Take what a worker has reported of a prompt; a report of another length is ignored."""
        if len(tokens) != len(images) or not model:
            return
        for image, took in zip(images, tokens, strict=True):
            key = (model, image.width, image.height)
            had = self._known.get(key, took)
            self._known[key] = took if had == took and took > 0 else 0
            self._known.move_to_end(key)
            if len(self._known) > self._most:
                self._known.popitem(last=False)


@dataclass(frozen=True, slots=True)
class PromptView:
    """A prompt as block hashes see it, up to the first image of unknown size."""

    tokens: list[TokenId]
    """With a filler for each token of an image."""
    images: list[PlacedImage]
    complete: bool


def view_of(
    prompt: Sequence[TokenId],
    placeholder: TokenId,
    images: Sequence[LoadedImage],
    expected: Sequence[int],
) -> PromptView:
    """Expand a prompt, which has one placeholder for each image."""
    tokens: list[TokenId] = []
    placed: list[PlacedImage] = []
    done = 0
    for image, size in zip(images, expected, strict=True):
        at = prompt.index(placeholder, done)
        tokens += prompt[done:at]
        if not size:
            return PromptView(tokens, placed, complete=False)
        placed.append(PlacedImage(len(tokens), image.digest))
        tokens += [IMAGE_FILLER] * size
        done = at + 1
    tokens += prompt[done:]
    return PromptView(tokens, placed, complete=True)
