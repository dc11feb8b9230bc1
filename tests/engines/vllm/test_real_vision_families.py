"""Images in the real vLLM with models of several families: how each names an image in a prompt and
what it makes of one; answers are those of transformers and of vLLM alone.

`test_real_images` has the details, with one model. A run takes one family: each loads for a while.
"""

from __future__ import annotations

import io
import json
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
from tests.engines.vllm import real
from tests.engines.vllm.vision_families import FAMILIES, family_checkpoint
from tests.engines.vllm.vision_model import expected, picture
from tests.engines.vllm.vllm_pool import Router
from tests.support.seeds import is_long, number_for, run_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.testing.inline_engine import InlineEngine

real.require_vllm()
pytestmark = [*real.MARKS, pytest.mark.long(one_in=16, turn=7)]

DRAWN = [*FAMILIES] if is_long() else [sorted(FAMILIES)[number_for(run_seed()) % len(FAMILIES)]]
LIMITS = {"limit_mm_per_prompt": json.dumps({"image": 3})}
CAT, DOG, WIDE = picture(1), picture(2), picture(3, 168, 56)
PAIRS = [(CAT, DOG), (DOG, CAT), (CAT, CAT), (WIDE, CAT)]
FIXED = {"llava", "gemma3"}
"""Those of which every image takes the same number of tokens."""


def spec_of(name: str) -> Any:
    return msgspec.structs.replace(
        real.MAIN,
        model=str(family_checkpoint(name)[0]),
        max_model_len=256,
        max_sequences=6,
        options=real.EAGER | LIMITS,
    )


@pytest.fixture(scope="module", params=DRAWN)
def family(request: pytest.FixtureRequest, engines: None) -> Iterator[str]:
    """A family whose engine is loaded, before a test looks for leaks."""
    spec = spec_of(request.param)
    real.loaded(spec)
    yield request.param
    real.unload(spec)


@pytest.fixture
def engine(family: str) -> Iterator[InlineEngine]:
    with real.inline(spec_of(family)) as inline:
        yield inline


def text_of(family: str) -> str:
    mark = FAMILIES[family].mark
    return f"look at this {mark} and say what it shows, and then this {mark} as well: "


def prompt_of(engine: InlineEngine, text: str) -> list[int]:
    core: Any = engine.core
    tokenizer = core.engine._input.renderer.get_tokenizer()
    found: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return found


def safe(family: str, files: list[bytes]) -> tuple[list[int], list[int]]:
    """The expanded prompt, and the answer up to a step that rounding may decide."""
    folder, model = family_checkpoint(family)
    text, left_out = text_of(family), FAMILIES[family].left_out
    expanded, output, gaps = expected(model, folder, text, files, 10, left_out)
    end = next((i for i, gap in enumerate(gaps) if gap < 1e-3), len(output))
    return expanded, output[:end]


def test_the_card_says_how_prompts_name_images(engine: InlineEngine, family: str) -> None:
    """One token, also where a template writes several; what is around it stays text."""
    card = engine.capabilities.image
    assert card is not None
    assert "images" in engine.capabilities.features
    assert (card.token, card.text, card.most) == (FAMILIES[family].image, FAMILIES[family].mark, 3)
    prompt = prompt_of(engine, text_of(family))
    assert prompt.count(card.token) == 2


def test_answers_are_those_of_transformers(engine: InlineEngine, family: str) -> None:
    """All in one batch, in chunks of 64 tokens, and again from the cache."""
    prompt = prompt_of(engine, text_of(family))
    wanted = [safe(family, list(pair)) for pair in PAIRS]
    assert len({tuple(output[:4]) for _, output in wanted}) >= 3
    requests = [real.request(prompt, max_tokens=10, images=pair) for pair in PAIRS]
    for again in (False, True):
        ledgers = [engine.submit(each) for each in requests]
        engine.run()
        for ledger, (expanded, output) in zip(ledgers, wanted, strict=True):
            assert ledger.error is None
            assert len(output) >= 4
            assert ledger.tokens[0][: len(output)] == output
            start, finish = ledger.starts[0], ledger.finishes[0]
            assert start is not None
            assert finish is not None
            assert finish.prompt_tokens == len(expanded)
            assert sum(start.image_tokens) == len(expanded) - len(prompt) + len(start.image_tokens)
            if again:
                assert start.cached_tokens == (len(expanded) - 1) // real.BLOCK * real.BLOCK > 0


def test_answers_are_those_of_vllm_alone(engine: InlineEngine, family: str) -> None:
    """vLLM's own path of a prompt: its decoding, its names of images, its tokens."""
    core: Any = engine.core
    prompt = prompt_of(engine, text_of(family))
    (ours,) = real.answer(engine, prompt=prompt, images=(DOG, WIDE), max_tokens=12)
    from vllm.sampling_params import SamplingParams

    images = [Image.open(io.BytesIO(file)) for file in (DOG, WIDE)]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
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


def test_blocks_have_the_names_that_a_frontend_gives_them(
    engine: InlineEngine, family: str
) -> None:
    """An image's digest is in the names of all blocks that have its tokens, and of those behind."""
    prompt, router, named = prompt_of(engine, text_of(family)), Router(), set[bytes]()
    token = FAMILIES[family].image
    root = prompt_root(real.SECRET, engine.capabilities.compat_hash, "")
    sizes = set[int]()
    for files in ((CAT, WIDE), (CAT, DOG)):
        ledger = engine.submit(real.request(prompt, max_tokens=60, images=files))
        engine.run()
        start = ledger.starts[0]
        assert start is not None
        sizes |= {*start.image_tokens}
        tokens: list[int] = []
        images: list[PlacedImage] = []
        left = [*zip(files, start.image_tokens, strict=True)]
        for each in (*prompt, *ledger.tokens[0][:-1]):
            if each == token and left:
                file, size = left.pop(0)
                images.append(PlacedImage(len(tokens), image_digest(file)))
                tokens += [IMAGE_FILLER] * size
            else:
                tokens.append(each)
        joined = image_block_hashes(tokens, images, real.BLOCK, parent=root, secret=real.SECRET)
        named |= {*split_hashes(joined)}
    assert min(sizes) > 1, "an image takes several tokens"
    assert (len(sizes) > 1) == (family not in FIXED)
    router.hear(engine.kv_events)
    assert router.device == named
    assert len(named) > 4


def test_other_pictures_of_one_size_share_only_what_is_before(
    engine: InlineEngine, family: str
) -> None:
    head = prompt_of(engine, "the same words before the picture of all of these requests, " * 3)
    mark = prompt_of(engine, FAMILIES[family].mark)
    prompt = [*head, *mark, *head]

    def cached(file: bytes) -> int:
        ledger = engine.submit(real.request(prompt, images=(file,)))
        engine.run()
        start = ledger.starts[0]
        assert start is not None
        return start.cached_tokens

    before = mark.index(FAMILIES[family].image)
    text = (len(head) + before) // real.BLOCK * real.BLOCK
    assert text > 0
    assert (cached(CAT), cached(DOG)) == (0, text)
    assert cached(CAT) == cached(DOG) > text


def test_a_request_goes_on_after_a_cut(engine: InlineEngine, family: str) -> None:
    """Positions of the answer follow from the images before it."""
    shape: dict[str, Any] = {"images": (WIDE, DOG), "max_tokens": 8}
    prompt = prompt_of(engine, text_of(family))
    (whole,) = real.answer(engine, prompt=prompt, **shape)
    for cut in (1, 5):
        assert real.answer(engine, prompt=prompt, output=[whole[:cut]], **shape) == [whole]
