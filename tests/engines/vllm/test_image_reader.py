"""Prompts with images in the core, over a fake of vLLM: expanded, named, refused, dropped."""

from __future__ import annotations

import re
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.blocks.hashing import prompt_root, split_hashes
from pdserve.blocks.image_hashes import (
    IMAGE_FILLER,
    PlacedImage,
    image_block_hashes,
    image_digest,
)
from pdserve.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest, StepFailed
from pdserve.messages.card import ImagePlaceholder
from pdserve_engines.vllm.image_reader import identifier, image_of
from tests.engines.vllm import fake_vision, fake_vllm
from tests.engines.vllm.fake_vision import MARK, file_of
from tests.engines.vllm.test_core import SPEC, Inline, request
from tests.engines.vllm.vllm_pool import Router

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CAT, DOG = file_of(9, "a cat"), file_of(6, "a dog")
PROMPT = (17, 42, MARK, 8, 9, MARK, 10)


@pytest.fixture(autouse=True)
def _fake_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fake_vision, "images_per_prompt", 3)
    fake_vllm.install(monkeypatch)
    yield
    fake_vision.reading.set()


class Seeing(Inline):
    """A core that waits for images, too."""

    def run(self) -> None:
        while len(self.vllm_core._images) or self.core.has_work:
            super().run()
            time.sleep(0.001)


@pytest.fixture
def engine() -> Iterator[Seeing]:
    engine = Seeing()
    with engine:
        yield engine


def names_of(engine: Inline, pieces: Sequence[int | bytes], output: Sequence[int]) -> set[bytes]:
    """What a frontend that knows how many tokens each image takes calls the blocks."""
    tokens: list[int] = []
    images = []
    for piece in (*pieces, *output):
        if isinstance(piece, int):
            tokens.append(piece)
        else:
            images.append(PlacedImage(len(tokens), image_digest(piece)))
            tokens += [IMAGE_FILLER] * int(piece.split()[0])
    secret = SPEC.hash_secret
    root = prompt_root(secret, engine.capabilities.compat_hash, "")
    return {*split_hashes(image_block_hashes(tokens, images, 4, parent=root, secret=secret))}


def failure(engine: Seeing, **changes: Any) -> Any:
    ledger = engine.submit(request(**changes))
    engine.run()
    return ledger.error


def test_the_name_of_an_image_says_all_that_events_need() -> None:
    digest = image_digest(b"x")
    name = identifier(digest, 17)
    assert image_of(name) == image_of(f"adapter@1:{name}") == (digest, 17)
    for other in ("pdserve:00ff", "an adapter", "abc/", "zz/1", 7, None):
        assert image_of(other) is None


def test_the_card_says_how_prompts_name_images(engine: Seeing) -> None:
    assert "images" in engine.capabilities.features
    assert engine.capabilities.image == ImagePlaceholder(token=MARK, text="<mark>", most=3)


def test_a_model_that_takes_no_images_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_vision, "images_per_prompt", 0)
    engine = Seeing()
    with engine:
        assert "images" not in engine.capabilities.features
        error = failure(engine, prompt=PROMPT, images=(CAT, DOG))
    assert isinstance(error, InvalidRequest)
    assert "takes no images" in error.message


def says(monkeypatch: pytest.MonkeyPatch, tokens: Sequence[int]) -> None:
    """The model's own text for an image becomes these tokens."""
    tokenizer = SimpleNamespace(
        encode=lambda text, add_special_tokens: [*tokens], decode=lambda ids: f"<{ids[0]}>"
    )
    monkeypatch.setattr(fake_vision.Renderer, "get_tokenizer", lambda self: tokenizer)


@pytest.mark.parametrize("around", [(1, MARK, 2), (MARK, 2), (1, MARK)])
def test_marks_around_a_placeholder_stay_in_the_prompt(
    monkeypatch: pytest.MonkeyPatch, around: tuple[int, ...]
) -> None:
    says(monkeypatch, around)
    with Seeing() as engine:
        assert engine.capabilities.image == ImagePlaceholder(token=MARK, text="<mark>", most=3)
        prompt = (17, *around, 8, *around, 10)
        ledger = engine.submit(request(prompt, images=(CAT, DOG)))
        engine.run()
        finish = ledger.finishes[0]
        assert finish is not None
        assert finish.prompt_tokens == len(prompt) - 2 + 9 + 6


@pytest.mark.parametrize("text", [None, "", "<another model's mark>"])
def test_a_mark_without_a_text_of_its_own_gets_the_tokens(
    monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    """As with Pixtral, whose class in vLLM is LLaVA's or has none."""
    encode = {"<mark>": [MARK]}.get
    tokenizer = SimpleNamespace(
        encode=lambda text, add_special_tokens: encode(text, [5, 6]),
        decode=lambda ids: f"<{ids[0]}>",
    )
    monkeypatch.setattr(fake_vision.Renderer, "get_tokenizer", lambda self: tokenizer)
    monkeypatch.setattr(fake_vision, "placeholder_text", text)
    with Seeing() as engine:
        assert engine.capabilities.image == ImagePlaceholder(token=MARK, text=f"<{MARK}>", most=3)


@pytest.mark.parametrize(
    ("expanded", "place", "reason"),
    [
        ([7, 8, 8, 9], (1, 2), "takes the place of 2 tokens of '<mark>'"),
        ([8, 8, 9], (0, 2), "takes the place of 3 tokens of '<mark>'"),
        ([5, 8, 8, 9], (1, 2), "writes more into a prompt than the image"),
        ([7, 1, 1, 8, 8, 2, 9], (3, 2), "writes more into a prompt than the image"),
        ([7, 1, 2, 9], None, "makes 0 images of '<mark>'"),
    ],
)
def test_a_prompt_that_is_expanded_otherwise_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    expanded: list[int],
    place: tuple[int, int] | None,
    reason: str,
) -> None:
    """The model is served for text."""
    says(monkeypatch, [7, 1, 2, 9])
    places = [] if place is None else [fake_vision.PlaceholderRange(*place)]
    found = {"prompt_token_ids": expanded, "mm_placeholders": {"image": places}}
    monkeypatch.setattr(fake_vision.Renderer, "_process_multimodal", lambda *_, **__: found)
    with Seeing() as engine:
        assert engine.capabilities.image is None
        assert "images" not in engine.capabilities.features
    assert reason in caplog.text


def test_the_prompt_is_expanded_and_counted(engine: Seeing) -> None:
    ledger = engine.submit(request(PROMPT, images=(CAT, DOG), image_tokens=(9, 5)))
    engine.run()
    assert ledger.done
    start, finish = ledger.starts[0], ledger.finishes[0]
    assert start is not None
    assert finish is not None
    assert start.image_tokens == (9, 6)
    assert finish.prompt_tokens == 5 + 9 + 6
    stats = engine.vllm_core.stats()
    assert (stats.images, stats.images_unexpected, stats.prompt_tokens) == (2, 1, 20)


def test_reading_counts_as_waiting(engine: Seeing) -> None:
    """Routers learn from the seconds of a prefill."""
    fake_vision.reading.clear()
    ledger = engine.submit(request(PROMPT, images=(CAT, DOG)))
    engine.clock.advance(5.0)
    fake_vision.reading.set()
    engine.run()
    start = ledger.starts[0]
    assert start is not None
    assert start.queue_seconds >= 5.0
    assert start.prefill_seconds < 1.0


def test_answers_depend_on_what_images_show(engine: Seeing) -> None:
    def answer(*images: bytes) -> Any:
        return engine.generate([request(PROMPT, images=images)])

    assert answer(CAT, DOG) == answer(CAT, DOG)
    assert answer(CAT, DOG) != answer(CAT, file_of(6, "a wolf"))


def test_choices_share_the_images(engine: Seeing) -> None:
    ledger = engine.submit(request(PROMPT, images=(CAT, DOG), n=2, temperature=1.0))
    engine.run()
    assert ledger.done
    assert [start and start.cached_tokens for start in ledger.starts] == [0, 16]


@pytest.mark.parametrize("wolf", [file_of(9, "a wolf"), file_of(8, "a wolf")])
def test_routers_hear_the_names_that_frontends_give(engine: Seeing, wolf: bytes) -> None:
    """Equal images share their blocks, others do not, and what stands before them is shared."""
    router = Router()
    expected = set[bytes]()
    prompt = (1, 2, 3, 4, 5, MARK, 6, MARK, *range(20, 29))
    for images in ((CAT, DOG), (CAT, CAT), (wolf, DOG), (CAT, DOG)):
        ledger = engine.submit(request(prompt, images=images, max_tokens=6))
        engine.run()
        one, other = images
        pieces = [1, 2, 3, 4, 5, one, 6, other, *range(20, 29)]
        expected |= names_of(engine, pieces, ledger.tokens[0][:-1])
    router.hear(engine.kv_events)
    assert router.device == expected
    start = ledger.starts[0]
    assert start is not None
    assert start.cached_tokens == 28, "the last request is the first one again"


def test_an_image_at_the_beginning_and_longer_than_a_run_of_blocks(engine: Seeing) -> None:
    """Its blocks are stored by several steps, whose events see only a part of it."""
    image, router = file_of(45, "a long wall"), Router()
    ledger = engine.submit(request((MARK, 5, 6), images=(image,), max_tokens=2))
    engine.run()
    router.hear(engine.kv_events)
    assert router.device == names_of(engine, [image, 5, 6], ledger.tokens[0][:-1])


def test_no_step_waits_for_an_image(engine: Seeing) -> None:
    fake_vision.reading.clear()
    seeing = engine.submit(request(PROMPT, images=(CAT, DOG)))
    text = engine.submit(request())
    while engine.core.has_work:
        engine.step()
    assert text.done
    assert not seeing.done
    assert engine.vllm_core.stats().waiting == 1
    fake_vision.reading.set()
    engine.run()
    assert seeing.done


def test_a_request_is_dropped_while_its_images_are_read(engine: Seeing) -> None:
    fake_vision.reading.clear()
    ledger = engine.submit(request(PROMPT, images=(CAT, DOG)))
    late = engine.submit(request(PROMPT, images=(CAT, DOG), deadline=5.0))
    engine.abort(ledger)
    engine.clock.advance(6.0)
    engine.step()
    assert isinstance(late.error, DeadlineExceeded)
    fake_vision.reading.set()
    engine.run()
    assert not any(map(any, ledger.tokens))
    assert engine.vllm_core.stats().images == 0


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"images": (CAT, b"<html>")}, InvalidRequest, "image 1 of the prompt .* decoded"),
        ({"images": (CAT, file_of(0, "nothing"))}, InvalidRequest, "takes no tokens"),
        ({"images": (CAT,)}, InvalidRequest, "2 placeholders for 1 images"),
        ({"images": (CAT, DOG), "image_tokens": (9,)}, InvalidRequest, "placeholders"),
        ({"images": (CAT,) * 4}, InvalidRequest, "has 4 images; this engine takes 3"),
        ({"images": (CAT, file_of(51, "much"))}, InvalidRequest, "takes 51 tokens, .* hold 50"),
        (
            {"images": (CAT, file_of(106, "all"))},
            ContextLengthExceeded,
            "has 120 tokens, 115 of them for its 2 images",
        ),
        ({"images": (CAT, file_of(5, "a fault"))}, StepFailed, "RuntimeError"),
        ({"images": (CAT, DOG), "prompt_logprobs": 1}, InvalidRequest, "logprobs of a prompt"),
    ],
)
def test_what_cannot_be_read_is_refused(
    engine: Seeing, changes: dict[str, Any], kind: type, words: str
) -> None:
    error = failure(engine, prompt=PROMPT, **changes)
    assert isinstance(error, kind)
    assert re.search(words, str(error))
    assert engine.generate([request()]), "the engine goes on"


def test_the_thread_ends_with_the_core() -> None:
    with Seeing() as engine:
        engine.generate([request(PROMPT, images=(CAT, DOG))])
        assert any(each.name == "pdserve-vllm-images" for each in threading.enumerate())
    assert all(each.name != "pdserve-vllm-images" for each in threading.enumerate())


def test_a_release_without_these_parts_serves_text(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake_vllm.InputProcessor.__init__

    def older(self: Any, config: Any) -> None:
        made(self, config)
        del self.renderer, self.model_config

    monkeypatch.setattr(fake_vllm.InputProcessor, "__init__", older)
    engine = Seeing()
    with engine:
        assert engine.capabilities.image is None
        assert engine.generate([request()])
