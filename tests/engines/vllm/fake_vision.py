"""The side of the fake vLLM that sees: a file is a number of tokens and what the picture shows.

What it does was read in these files of vLLM 0.32.0: `renderers/base.py` (`_process_multimodal`),
`multimodal/inputs.py` (`PlaceholderRange`, `MultiModalFeatureSpec`), `multimodal/media/image.py`,
and `v1/core/kv_cache_utils.py` (`_gen_mm_extra_hash_keys`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

MARK = 1270
"""The token that stands for an image; its tokens are `PATCH`, and `LAST` at its end."""
PATCH, LAST = 1271, 1272
ENCODER_CACHE = 50

images_per_prompt = 0
"""For tests: 0, and the model takes no images."""
placeholder_text: str | None = "<mark>"
"""For tests: the text for an image that the model's class has."""
reading: threading.Event = threading.Event()
"""For tests: pictures are read while it is set."""
reading.set()


def file_of(tokens: int, shows: str) -> bytes:
    """A picture that takes this many tokens."""
    return b"%d %s" % (tokens, shows.encode())


@dataclass
class PlaceholderRange:
    """`multimodal/inputs.py`."""

    offset: int
    length: int

    def get_num_embeds(self) -> int:
        return self.length


@dataclass
class MultiModalFeatureSpec:
    """`multimodal/inputs.py`."""

    data: Any
    modality: str
    identifier: str
    mm_position: PlaceholderRange
    mm_hash: str | None = None


class ImageMediaIO:
    """`multimodal/media/image.py`: what it decodes."""

    def load_bytes(self, data: bytes) -> tuple[int, bytes]:
        tokens, _, shows = data.partition(b" ")
        if not tokens.isdigit():
            raise ValueError("Failed to load image: cannot identify image file")
        return int(tokens), shows


class Renderer:
    """`renderers/base.py`."""

    def __init__(self, most: int) -> None:
        self.mm_processor = None if not most else _processor(most)
        self.names: list[list[str]] = []
        """The names of the images of each prompt, as they were given."""

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(
            encode=lambda text, add_special_tokens: [MARK], decode=lambda ids: f"<{ids[0]}>"
        )

    def _process_multimodal(
        self,
        prompt: list[int],
        mm_data: dict[str, list[Any]],
        mm_uuids: dict[str, list[str]],
        mm_processor_kwargs: None,
        *,
        skip_mm_cache: bool,
    ) -> dict[str, Any]:
        assert skip_mm_cache, "the other cache loses images of requests that are dropped"
        assert reading.wait(10.0), "nobody lets pictures be read"
        self.names.append(mm_uuids["image"])
        items = [_item(item) for item in mm_data["image"]]
        if any(shows == b"a fault" for _, shows in items):
            raise RuntimeError("a fault of the processor")
        left, tokens, places = list(items), list[int](), []
        for token in prompt:
            if token != MARK:
                tokens.append(token)
                continue
            length, _ = left.pop(0)
            if not length:
                raise ValueError("an image takes no tokens")
            places.append(PlaceholderRange(len(tokens), length))
            tokens += [PATCH] * (length - 1) + [LAST]
        return {
            "prompt_token_ids": tokens,
            "mm_kwargs": {"image": [shows for _, shows in items]},
            "mm_placeholders": {"image": places},
        }


def _item(item: Any) -> tuple[int, bytes]:
    """Pictures of tests are decoded files; the one with which an engine is tried out is real."""
    return item if isinstance(item, tuple) else (4, b"a real picture")


def _processor(most: int) -> Any:
    return SimpleNamespace(
        info=SimpleNamespace(allowed_mm_limits={"image": most}),
        dummy_inputs=SimpleNamespace(get_dummy_text=lambda counts: "<mark>"),
    )


def keys_of(images: list[Any], number: int, size: int) -> list[tuple[str, int]]:
    """Extra keys of a block: the images that it has a part of, with the distance to their first
    tokens."""
    start, end = number * size, (number + 1) * size
    return [
        (each.identifier, each.mm_position.offset - start)
        for each in images
        if each.mm_position.offset < end
        and start < each.mm_position.offset + each.mm_position.length
    ]


def modules() -> Iterator[tuple[str, dict[str, Any]]]:
    """Modules of vLLM and their content."""
    model = SimpleNamespace(get_placeholder_str=lambda modality, number: placeholder_text)
    yield "vllm.model_executor.model_loader.utils", {"get_model_cls": lambda config: model}
    yield "vllm.multimodal.inputs", {"MultiModalFeatureSpec": MultiModalFeatureSpec}
    yield "vllm.multimodal.media.image", {"ImageMediaIO": ImageMediaIO}
