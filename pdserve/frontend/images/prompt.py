"""Puts the images of a chat into its prompt: refused, loaded, rendered, found again, named.

The model's template writes one placeholder for each image; after tokenizing there must be as many
placeholder tokens as images, so neither a template that leaves images out nor a text that looks
like a placeholder can shift one image to the place of another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.errors import InvalidRequest
from pdserve.frontend.images.image_tokens import view_of
from pdserve.frontend.images.loader import (
    count_parts,
    find_images,
    image_error,
    without_files,
)
from pdserve.protocols.completion_requests import ChatRequest, ContentPart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.frontend.images.image_tokens import LoadedImage
    from pdserve.frontend.plan import Prompt
    from pdserve.frontend.preprocess.input_processor import PlanContext
    from pdserve.frontend.preprocess.prompt_hashes import PromptHashes
    from pdserve.messages.card import ModelCard
    from pdserve.protocols.completion_requests import Message
    from pdserve.text.text_pool import TextWork

__all__ = ["check_no_images", "image_names", "learning", "place_images", "take_images"]

_WHO: Final = "'--engine vllm' serves them with models that see"


async def take_images(
    request: ChatRequest, context: PlanContext
) -> tuple[ChatRequest, tuple[LoadedImage, ...]]:
    """The request as its template sees it, and its images.

    Errors: `InvalidRequest` names the part, the cause and the remedy; `Overloaded`.
    """
    found = await _find(request.messages, context.pool)
    if not found:
        return request, ()
    card, intake = context.model.card, context.images
    if intake is None:
        raise _not_here(found[0][0])
    if "images" not in card.features or card.image is None:
        where = found[0][0]
        raise image_error(
            where,
            f"'{where}': the model '{card.name}' takes no images with the engine "
            f"'{card.engine}'; {_WHO}",
        )
    for name in ("truncate_prompt_tokens", "prompt_logprobs"):
        if getattr(request, name) is not None:
            raise InvalidRequest(f"'{name}' cannot be used with images: leave it out", param=name)
    images = await intake.load(found, card, context.pool)
    part = ContentPart(type="image", text=card.image.text)
    size = count_parts(request.messages)
    bare = await context.pool.run(size, without_files, request.messages, part)
    return replace(request, messages=bare), tuple(images)


async def check_no_images(messages: Sequence[Message], pool: TextWork) -> None:
    """Refuses images where they are not taken. Errors: `InvalidRequest`."""
    found = await _find(messages, pool)
    if found:
        raise _not_here(found[0][0])


async def _find(messages: Sequence[Message], pool: TextWork) -> list[tuple[str, str]]:
    parts = count_parts(messages)
    return await pool.run(parts, find_images, messages) if parts else []


def _not_here(where: str) -> InvalidRequest:
    return image_error(
        where,
        f"'{where}': how many tokens an image takes is known after an answer only: leave images "
        "out here",
    )


def place_images(prompt: Prompt, images: Sequence[LoadedImage], context: PlanContext) -> Prompt:
    """The prompt with its images. Errors: `InvalidRequest` if the template has not written one
    placeholder for each."""
    card = context.model.card
    if card.image is None:
        return prompt
    marks = prompt.tokens.count(card.image.token)
    if marks != len(images):
        raise _misplaced(marks, len(images), card.image.text)
    if not images or context.images is None:
        return prompt
    expected = context.images.tokens.expected(card.compat_hash, images)
    return replace(prompt, images=tuple(images), image_tokens=expected)


def _misplaced(marks: int, images: int, text: str) -> InvalidRequest:
    if marks < images:
        return InvalidRequest(
            f"the chat template has places for {marks} of {images} images: send them in messages "
            "of the user, beside a text",
            param="messages",
        )
    return InvalidRequest(
        f"the messages contain {text!r}, which stands for an image, {marks - images} times without "
        "an image: leave it out",
        param="messages",
    )


async def image_names(
    prompt: Prompt, card: ModelCard, salt: str, context: PlanContext
) -> PromptHashes:
    """The block hashes of a prompt with images; those behind an image of unknown size are left
    out, which is counted. Errors: as `PromptHasher.of`."""
    assert card.image is not None, "the prompt has images"
    view = view_of(prompt.tokens, card.image.token, prompt.images, prompt.image_tokens)
    if not view.complete and context.images is not None:
        context.images.metrics.image_prompts_unnamed.inc()
    lora = context.model.lora
    return await context.naming.of_view(card, salt, view, context.pool, lora=lora)


def learning(
    images: Sequence[LoadedImage], context: PlanContext
) -> Callable[[tuple[int, ...]], None]:
    """A function that takes the tokens that each image took, from the worker."""
    model, known = context.model.card.compat_hash, context.images

    def learn(tokens: tuple[int, ...]) -> None:
        if known is not None:
            known.tokens.learn(model, images, tokens)

    return learn
