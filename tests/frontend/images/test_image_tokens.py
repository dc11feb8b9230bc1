"""How many tokens images take is learned by their size, and expands prompts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.blocks.image_hashes import IMAGE_FILLER, PlacedImage, image_digest
from pdserve.frontend.images.image_tokens import ImageTokens, LoadedImage, view_of


def image(width: int = 30, height: int = 20, shows: bytes = b"") -> LoadedImage:
    return LoadedImage(shows, image_digest(shows), width, height)


def test_a_size_is_known_after_its_first_answer() -> None:
    tokens, images = ImageTokens(), [image(), image(40)]
    assert tokens.expected("m", images) == (0, 0)
    tokens.learn("m", [image(shows=b"another one")], (12,))
    assert tokens.expected("m", images) == (12, 0)
    assert tokens.expected("another model", images) == (0, 0)


def test_a_size_that_varies_is_not_guessed() -> None:
    tokens = ImageTokens()
    for took in (12, 13, 12):
        tokens.learn("m", [image()], (took,))
    assert tokens.expected("m", [image()]) == (0,)


def test_reports_that_fit_nothing_are_ignored() -> None:
    tokens = ImageTokens()
    tokens.learn("m", [image()], (12, 13))
    tokens.learn("", [image()], (12,))
    assert len(tokens) == 0
    tokens.learn("m", [image()], (0,))
    assert tokens.expected("m", [image()]) == (0,)


def test_sizes_that_are_asked_for_stay() -> None:
    tokens = ImageTokens(most=3)
    for width in range(1, 4):
        tokens.learn("m", [image(width)], (width,))
    assert tokens.expected("m", [image(1)]) == (1,)
    tokens.learn("m", [image(9)], (9,))
    assert len(tokens) == 3
    assert tokens.expected("m", [image(w) for w in (1, 2, 3, 9)]) == (1, 0, 3, 9)


def test_a_prompt_is_seen_up_to_an_unknown_image() -> None:
    images = [image(shows=b"a"), image(shows=b"b"), image(shows=b"c")]
    prompt = [1, 99, 2, 3, 99, 99, 4]
    whole = view_of(prompt, 99, images, (3, 1, 2))
    filler = IMAGE_FILLER
    assert whole.tokens == [1, *[filler] * 3, 2, 3, *[filler] * 3, 4]
    assert whole.images == [
        PlacedImage(1, images[0].digest),
        PlacedImage(6, images[1].digest),
        PlacedImage(7, images[2].digest),
    ]
    assert whole.complete
    part = view_of(prompt, 99, images, (3, 0, 2))
    assert part.tokens == [1, filler, filler, filler, 2, 3]
    assert part.images == whole.images[:1]
    assert not part.complete


@given(st.lists(st.one_of(st.integers(0, 5), st.integers(1, 6).map(lambda n: (n,)))))
def test_a_view_has_as_many_tokens_as_are_expected(pieces: list[int | tuple[int]]) -> None:
    prompt = [99 if isinstance(piece, tuple) else piece for piece in pieces]
    sizes = [piece[0] for piece in pieces if isinstance(piece, tuple)]
    view = view_of(prompt, 99, [image()] * len(sizes), sizes)
    assert len(view.tokens) == len(prompt) + sum(sizes) - len(sizes)
    assert [token for token in view.tokens if token != IMAGE_FILLER] == [
        piece for piece in pieces if isinstance(piece, int)
    ]
