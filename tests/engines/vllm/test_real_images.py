"""Images in the real vLLM: answers are those of transformers and of vLLM alone, and the same
picture is computed once.

The engine takes a while to load; the fake of `test_image_reader.py` is tested in every run.
"""

from __future__ import annotations

import io
import json
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from PIL import Image

from pdserve.blocks.hashing import prompt_root, split_hashes
from pdserve.blocks.image_hashes import (
    IMAGE_FILLER,
    PlacedImage,
    image_block_hashes,
    image_digest,
)
from pdserve.errors import ContextLengthExceeded, InvalidRequest
from pdserve.messages.engine import TransferSpec
from tests.engines.vllm import real, real_pair, vision_model
from tests.engines.vllm.vision_model import IMG, picture
from tests.engines.vllm.vllm_pool import Router

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.testing.inline_engine import InlineEngine

real.require_vllm()
pytestmark = [*real.MARKS, pytest.mark.long(one_in=8, turn=3)]

FOLDER, MODEL = vision_model.vision_checkpoint()
LIMITS = {"limit_mm_per_prompt": json.dumps({"image": 3})}
SPEC = msgspec.structs.replace(
    real.MAIN, model=str(FOLDER), max_model_len=256, max_sequences=6, options=real.EAGER | LIMITS
)
DECODES = msgspec.structs.replace(SPEC, transfer=TransferSpec(verify="all"))
"""It stages KV for other workers, as a decode worker does."""
engines_of_this_file = real.keeps(SPEC, DECODES)

TEXT = "look at this <image> and say what it shows, and then this <image> as well: "
CAT, DOG, WIDE = picture(1), picture(2), picture(3, 168, 56)


@pytest.fixture
def engine() -> Iterator[InlineEngine]:
    with real.inline(SPEC) as inline:
        yield inline


def tokens_of(engine: InlineEngine, text: str) -> list[int]:
    core: Any = engine.core
    tokenizer = core.engine._input.renderer.get_tokenizer()
    found: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return found


def safe(text: str, files: list[bytes]) -> tuple[list[int], list[int]]:
    """The expanded prompt, and the answer up to a step that rounding may decide."""
    expanded, output, gaps = vision_model.expected(MODEL, FOLDER, text, files, 10)
    end = next((i for i, gap in enumerate(gaps) if gap < 1e-3), len(output))
    return expanded, output[:end]


def test_answers_are_those_of_transformers(engine: InlineEngine) -> None:
    """All in one batch, in chunks of 64 tokens, and again from the cache."""
    prompt = tokens_of(engine, TEXT)
    assert prompt.count(IMG) == 2
    pairs = [(CAT, DOG), (DOG, CAT), (CAT, CAT), (WIDE, CAT)]
    expected = [safe(TEXT, list(pair)) for pair in pairs]
    assert len({tuple(output[:4]) for _, output in expected}) >= 3
    requests = [real.request(prompt, max_tokens=10, images=pair) for pair in pairs]
    for _ in range(2):
        ledgers = [engine.submit(each) for each in requests]
        engine.run()
        for ledger, (expanded, output) in zip(ledgers, expected, strict=True):
            assert ledger.error is None
            assert len(output) >= 4
            assert ledger.tokens[0][: len(output)] == output
            finish = ledger.finishes[0]
            assert finish is not None
            assert finish.prompt_tokens == len(expanded)


def test_answers_are_those_of_vllm_alone(engine: InlineEngine) -> None:
    """vLLM's own path of a prompt: its decoding, its names of images, its tokens."""
    core: Any = engine.core
    prompt = tokens_of(engine, TEXT)
    (ours,) = real.answer(engine, prompt=prompt, images=(CAT, WIDE), max_tokens=10)
    from vllm.sampling_params import SamplingParams

    images = [Image.open(io.BytesIO(file)) for file in (CAT, WIDE)]
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, detokenize=False)
    with real.quiet():
        wanted = core.engine._input.process_inputs(
            "alone",
            {"prompt_token_ids": prompt, "multi_modal_data": {"image": images}},
            params,
            ("generate",),
        )
    core.engine._client.add_request(wanted)
    found: list[int] = []
    while core.engine.has_work:
        outputs, _ = core.engine.step()
        found += [token for output in outputs for token in output.new_token_ids]
    assert found == ours


def test_blocks_have_the_names_that_a_frontend_gives_them(engine: InlineEngine) -> None:
    prompt, router, expected = tokens_of(engine, TEXT), Router(), set[bytes]()
    sizes: dict[bytes, int] = {}
    for files in ((CAT, WIDE), (CAT, DOG)):
        ledger = engine.submit(real.request(prompt, max_tokens=40, images=files))
        engine.run()
        start = ledger.starts[0]
        assert start is not None
        sizes |= zip(files, start.image_tokens, strict=True)
        expected |= names(engine, prompt, list(files), sizes, ledger.tokens[0][:-1])
    assert len(set(sizes.values())) > 1, "sizes differ"
    router.hear(engine.kv_events)
    assert router.device == expected
    assert len(expected) > 4


def names(
    engine: InlineEngine,
    prompt: list[int],
    files: list[bytes],
    sizes: dict[bytes, int],
    output: list[int],
) -> set[bytes]:
    tokens: list[int] = []
    images, left = [], list(files)
    for token in (*prompt, *output):
        if token == IMG and left:
            file = left.pop(0)
            images.append(PlacedImage(len(tokens), image_digest(file)))
            tokens += [IMAGE_FILLER] * sizes[file]
        else:
            tokens.append(token)
    root = prompt_root(real.SECRET, engine.capabilities.compat_hash, "")
    joined = image_block_hashes(tokens, images, real.BLOCK, parent=root, secret=real.SECRET)
    return {*split_hashes(joined)}


def test_the_same_picture_is_computed_once(engine: InlineEngine) -> None:
    """The text before it is shared with any other picture."""
    head = tokens_of(engine, "the same words before the picture of all of these requests, " * 3)
    prompt = [*head, IMG, *head]

    def cached(file: bytes) -> int:
        ledger = engine.submit(real.request(prompt, images=(file,)))
        engine.run()
        start = ledger.starts[0]
        assert start is not None
        return start.cached_tokens

    text = len(head) // real.BLOCK * real.BLOCK
    assert text > 0
    assert (cached(CAT), cached(DOG)) == (0, text)
    assert cached(CAT) == cached(DOG) > text + real.BLOCK
    assert cached(picture(1, format="BMP")) == text, "another file of the same picture"


def test_choices_share_the_pictures(engine: InlineEngine) -> None:
    prompt = tokens_of(engine, TEXT)
    one, other = real.answer(engine, prompt=prompt, images=(CAT, DOG), n=2)
    assert one == other


def test_a_placeholder_alone_is_a_token(engine: InlineEngine) -> None:
    """In a completion, whose tokens a client may choose."""
    (found,) = real.answer(engine, prompt=[5, IMG, 6, IMG])
    assert len(found) == 8


def test_a_request_goes_on_after_a_cut(engine: InlineEngine) -> None:
    prompt = tokens_of(engine, TEXT)
    shape: dict[str, Any] = {"prompt": prompt, "images": (CAT, DOG), "max_tokens": 8}
    (whole,) = real.answer(engine, **shape)
    for cut in (1, 5):
        assert real.answer(engine, output=[whole[:cut]], **shape) == [whole]


def test_a_decode_worker_computes_them_itself() -> None:
    both = real_pair.make_pair(DECODES, DECODES)
    prompt = tokens_of(both.d.engine, TEXT)
    _, output = safe(TEXT, [CAT, DOG])
    wanted = real.request(prompt, max_tokens=10, images=(CAT, DOG))
    for cached in (0, 64):
        ledger = both.d.engine.submit(wanted)
        while not ledger.done:
            assert ledger.error is None
            both.d.engine.step()
            time.sleep(0.001)
        assert ledger.tokens[0][: len(output)] == output
        start = ledger.starts[0]
        assert start is not None
        assert start.cached_tokens == cached
        assert both.d.core.cached_blocks(wanted) == 0, "for peers there is nothing"
    both.close()


def test_what_cannot_be_read_ends_alone(engine: InlineEngine) -> None:
    prompt = tokens_of(engine, TEXT)
    good = engine.submit(real.request(prompt, images=(CAT, DOG)))
    broken = engine.submit(real.request(prompt, images=(CAT, DOG[: len(DOG) // 2])))
    text = engine.submit(real.request(prompt, images=(CAT, b"<svg></svg>")))
    long = engine.submit(real.request([*prompt, *prompt[:1] * 180], images=(CAT, WIDE)))
    engine.run()
    assert good.error is None
    for ledger in (broken, text):
        assert isinstance(ledger.error, InvalidRequest)
        assert "image 1 of the prompt" in ledger.error.message
    assert isinstance(long.error, ContextLengthExceeded)
    core: Any = engine.core
    assert core.stats().images == 2
