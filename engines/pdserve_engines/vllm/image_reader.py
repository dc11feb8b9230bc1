"""Reads the images of a prompt with vLLM's own processor, and expands their placeholders.

An image of a prompt is one token until it is read; then it takes as many tokens as the model makes
of it. vLLM's processor decides that, so an answer is the one that vLLM alone would give. Reading
decodes and scales pictures, which takes long: `image_queue` does it in a thread.

The identifier by which vLLM caches an image and names its blocks is the digest of its file and its
number of tokens. So its KV events say all that `block_names` needs.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pdserve.blocks.image_hashes import image_digest
from pdserve.errors import ContextLengthExceeded, InvalidRequest
from pdserve.messages.card import ImagePlaceholder
from pdserve.token_ids import token_ids

if TYPE_CHECKING:
    from pdserve.messages.request import GenerateRequest

__all__ = ["ImageReader", "ReadPrompt", "identifier", "image_of", "torchvision_fault"]

_LOG = logging.getLogger("pdserve.engines.vllm")


@dataclasses.dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A request whose images have been read."""

    request: GenerateRequest
    """With the expanded prompt, and without the images' files."""
    features: list[Any]
    """vLLM's records of the images, in order."""
    tokens: tuple[int, ...]
    """Tokens of each image."""
    unexpected: int
    """Images that take another number of tokens than the frontend expected."""


def identifier(digest: bytes, tokens: int) -> str:
    """The name of an image in vLLM."""
    return f"{digest.hex()}/{tokens}"


def image_of(name: object) -> tuple[bytes, int] | None:
    """The digest and the number of tokens that a name in vLLM says; None: pdserve has not made it.
    vLLM may put the name of an adapter before it."""
    if not isinstance(name, str):
        return None
    digest, _, tokens = name.rpartition(":")[2].partition("/")
    try:
        return bytes.fromhex(digest), int(tokens)
    except ValueError:
        return None


def torchvision_fault(config: Any) -> str:
    """What is wrong with torchvision, which most models that see need, to be added to an error.
    Empty: nothing, or vLLM's `config` is of a model without images."""
    if getattr(config.model_config, "multimodal_config", None) is None:
        return ""
    try:
        importlib.import_module("torchvision.transforms.v2.functional")
    except (ImportError, RuntimeError) as error:  # the latter: it was built for another torch
        return (
            f"; torchvision cannot be imported ({_words(error)}), and most models that see need "
            "it: install the release and the build of torchvision that belong to the installed "
            "torch"
        )
    return ""


class ImageReader:
    """The image side of one loaded vLLM engine. One thread at a time may use it."""

    def __init__(self, input_processor: Any, refusals: tuple[type[Exception], ...]) -> None:
        """`input_processor` is vLLM's `InputProcessor`; `refusals` are the exceptions by which
        vLLM refuses an input."""
        self._input = input_processor
        # A release of vLLM that has none of this serves text all the same.
        self._renderer: Any = getattr(input_processor, "renderer", None)
        self._model: Any = getattr(input_processor, "model_config", None)
        self._refusals = refusals
        self.placeholder = self._find_placeholder()
        """How prompts name images; None: the model takes none, or not as pdserve gives them."""

    def _find_placeholder(self) -> ImagePlaceholder | None:
        processor: Any = getattr(self._renderer, "mm_processor", None)
        most = 0 if processor is None else int(processor.info.allowed_mm_limits.get("image", 0))
        if not most:
            return None
        try:
            from vllm.model_executor.model_loader.utils import get_model_cls

            mark = processor.dummy_inputs.get_dummy_text({"image": 1})
            token = self._token_of(mark)
            text = self._text_of(token, get_model_cls(self._model).get_placeholder_str("image", 1))
        except Exception as error:  # a model's processor may raise anything
            _LOG.warning("images are not offered: %s: %s", type(error).__name__, error)
            return None
        return ImagePlaceholder(token=token, text=text, most=most)

    @property
    def _tokenizer(self) -> Any:
        return self._renderer.get_tokenizer()

    def _token_of(self, mark: str) -> int:
        """The token that an image takes the place of, in the text by which this model's processor
        is tried out. What is around it stays in the prompt. Reads a small image, so that a model
        whose prompts are expanded otherwise is found out now. Raises what the processor raises."""
        from PIL import Image

        tokens = list(self._tokenizer.encode(mark, add_special_tokens=False))
        found = self._process(tokens, [Image.new("RGB", (64, 64))], ["pdserve try-out"])
        places = found["mm_placeholders"]["image"]
        if len(places) != 1:
            raise ValueError(f"the processor makes {len(places)} images of {mark!r} and one image")
        (place,) = places
        whole, end = list(found["prompt_token_ids"]), place.offset + place.length
        before, behind = whole[: place.offset], whole[end:]
        replaced = tokens[len(before) : len(tokens) - len(behind)]
        if [*before, *replaced, *behind] != tokens:
            raise ValueError("the processor writes more into a prompt than the image")
        if len(replaced) != 1:
            raise ValueError(f"an image takes the place of {len(replaced)} tokens of {mark!r}")
        return int(replaced[0])

    def _text_of(self, token: int, text: str | None) -> str:
        """The text that becomes this token: the one that the model's class has, if its tokenizer
        knows it. LLaVA's class, for one, has LLaVA's text for Pixtral, too."""
        tokenizer = self._tokenizer
        if text and tokenizer.encode(text, add_special_tokens=False).count(token) == 1:
            return text
        return str(tokenizer.decode([token]))

    def _process(self, tokens: list[int], media: list[Any], names: list[str]) -> Any:
        """vLLM's multi-modal input. The cache that is used holds whole items: one whose items are
        handed over to another cache, in order, would lose those of requests that are dropped."""
        images, uuids = {"image": media}, {"image": names}
        return self._renderer._process_multimodal(tokens, images, uuids, None, skip_mm_cache=True)

    def facts(self) -> tuple[str, ...]:
        """What decides how an image becomes embeddings, besides the checkpoint's files."""
        config = self._config
        return (repr(config.mm_processor_kwargs), repr(config.media_io_kwargs))

    @property
    def _config(self) -> Any:
        return self._model.get_multimodal_config()

    # ------------------------------------------------------------------ one request

    def read(self, request: GenerateRequest, lora: Any) -> ReadPrompt:
        """Read the images of a request; `lora` is vLLM's record of its adapter.

        Raises `InvalidRequest`, and what a fault in vLLM's processor raises.
        """
        self._check(request)
        media = [self._decode(data, number) for number, data in enumerate(request.images)]
        digests = [image_digest(data) for data in request.images]
        try:
            found = self._process(list(request.prompt), media, [digest.hex() for digest in digests])
        except self._refusals as error:
            raise InvalidRequest(f"the images cannot be read: {_words(error)}") from error
        places = list(found["mm_placeholders"]["image"])
        self._check_room(request, len(found["prompt_token_ids"]), places)
        sizes = tuple(int(place.length) for place in places)
        tokens = found["prompt_token_ids"]
        expected = request.image_tokens or (0,) * len(sizes)
        wrong = sum(had not in (0, size) for had, size in zip(expected, sizes, strict=True))
        if len(tokens) != len(request.prompt) + sum(sizes) - len(sizes):
            wrong = len(sizes)  # the processor has changed text beside an image, too
        return ReadPrompt(
            replace(request, prompt=token_ids(tokens), images=(), image_tokens=()),
            self._features(found["mm_kwargs"]["image"], places, digests, lora),
            sizes,
            wrong,
        )

    def _check(self, request: GenerateRequest) -> None:
        mark = self.placeholder
        if mark is None:
            raise InvalidRequest("this worker's model takes no images", param="messages")
        marks = request.prompt.count(mark.token)
        if marks != len(request.images) or len(request.image_tokens) not in (0, marks):
            raise InvalidRequest(
                f"the prompt has {marks} placeholders for {len(request.images)} images",
                param="messages",
            )

    def _decode(self, data: bytes, number: int) -> Any:
        """One image as vLLM's own server would decode it."""
        from vllm.multimodal.media.image import ImageMediaIO

        options = (self._config.media_io_kwargs or {}).get("image", {})
        try:
            return ImageMediaIO(**options).load_bytes(data)
        except Exception as error:  # a decoder may raise anything for a broken file
            raise InvalidRequest(
                f"image {number} of the prompt (the first is 0) cannot be decoded: {_words(error)}",
                param="messages",
            ) from error

    def _check_room(self, request: GenerateRequest, tokens: int, places: list[Any]) -> None:
        most = int(self._model.max_model_len)
        if tokens >= most:
            raise ContextLengthExceeded(
                f"the prompt has {tokens} tokens, {sum(each.length for each in places)} of them "
                f"for its {len(places)} images; a context of {most} tokens leaves no room for "
                "output: send fewer or smaller images",
                param="messages",
            )
        largest, room = max(each.get_num_embeds() for each in places), self._input
        if largest > room.mm_encoder_cache_size:
            raise InvalidRequest(
                f"an image takes {largest} tokens, and this worker can hold "
                f"{room.mm_encoder_cache_size}: send a smaller one",
                param="messages",
            )

    def _features(
        self, items: Any, places: list[Any], digests: list[bytes], lora: Any
    ) -> list[Any]:
        from vllm.multimodal.inputs import MultiModalFeatureSpec

        features = []
        for item, place, digest in zip(items, places, digests, strict=True):
            name = identifier(digest, int(place.length))
            features.append(
                MultiModalFeatureSpec(
                    data=item,
                    modality="image",
                    identifier=self._input._get_mm_identifier(name, lora),
                    mm_position=place,
                    mm_hash=name,
                )
            )
        return features


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
