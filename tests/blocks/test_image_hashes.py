"""Block hashes of prompts with images: equal exactly where tokens and images are equal."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.blocks.hashing import HASH_SECRET_TEST, block_hashes, root_hash, split_hashes
from pdserve.blocks.image_hashes import (
    DIGEST_BYTES,
    IMAGE_FILLER,
    PlacedImage,
    image_block_hashes,
    image_digest,
    image_parent,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZE = 4
ROOT = root_hash(HASH_SECRET_TEST, "model", None, None)
CAT, DOG = image_digest(b"cat"), image_digest(b"dog")

Piece = int | tuple[bytes, int]
"""A token, or an image's digest and how many tokens it takes."""
PIECES = st.lists(
    st.one_of(
        st.integers(0, 2), st.tuples(st.sampled_from([CAT, DOG]), st.integers(1, 2 * SIZE + 1))
    ),
    max_size=12,
)


def expand(pieces: Sequence[Piece]) -> tuple[list[int], list[PlacedImage]]:
    tokens: list[int] = []
    images = []
    for piece in pieces:
        if isinstance(piece, int):
            tokens.append(piece)
        else:
            images.append(PlacedImage(len(tokens), piece[0]))
            tokens += [IMAGE_FILLER] * piece[1]
    return tokens, images


def hashes(pieces: Sequence[Piece]) -> list[bytes]:
    tokens, images = expand(pieces)
    joined = image_block_hashes(tokens, images, SIZE, parent=ROOT, secret=HASH_SECRET_TEST)
    return [*split_hashes(joined)]


def plainly(pieces: Sequence[Piece]) -> list[bytes]:
    """The definition, block by block."""
    tokens, images = expand(pieces)
    found: list[bytes] = []
    parent: bytes = ROOT
    for start in range(0, len(tokens) - SIZE + 1, SIZE):
        here = [i for i in images if start <= i.offset < start + SIZE]
        if here:
            message = b"pdserve image v1" + parent
            for image in here:
                message += (image.offset - start).to_bytes(4, "little") + image.digest
            parent = blake2b(message, digest_size=16, key=HASH_SECRET_TEST).digest()
        block = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + SIZE])
        parent = blake2b(parent + block, digest_size=16, key=HASH_SECRET_TEST).digest()
        found.append(parent)
    return found


@given(PIECES)
def test_the_hashes_are_as_defined(pieces: list[Piece]) -> None:
    assert hashes(pieces) == plainly(pieces)


@given(PIECES, PIECES)
def test_hashes_are_equal_exactly_where_all_before_is_equal(
    one: list[Piece], other: list[Piece]
) -> None:
    def content(pieces: list[Piece]) -> list[tuple[object, ...]]:
        """Each place: a token, or an image and the distance from its beginning."""
        places: list[tuple[object, ...]] = []
        for piece in pieces:
            if isinstance(piece, int):
                places.append((piece,))
            else:
                places += [(piece[0], place) for place in range(piece[1])]
        return places

    ours, theirs = content(one), content(other)
    for number, (left, right) in enumerate(zip(hashes(one), hashes(other), strict=False), 1):
        assert (left == right) == (ours[: number * SIZE] == theirs[: number * SIZE])


def test_a_prompt_without_images_has_the_hashes_of_text() -> None:
    tokens = list(range(11))
    plain = block_hashes(tokens, SIZE, parent=ROOT, secret=HASH_SECRET_TEST)
    assert hashes(tokens) == plain


def test_text_before_an_image_keeps_its_hashes() -> None:
    text = list(range(2 * SIZE))
    plain = block_hashes(text, SIZE, parent=ROOT, secret=HASH_SECRET_TEST)
    assert hashes([*text, (CAT, 9)])[:2] == plain


def test_the_place_of_an_image_in_its_block_counts() -> None:
    """A shorter text before it, and one more of its tokens, fill the same places with fillers."""
    filler = IMAGE_FILLER
    joined = [
        image_block_hashes(
            [1, filler, filler, filler],
            [PlacedImage(offset, CAT)],
            SIZE,
            parent=ROOT,
            secret=HASH_SECRET_TEST,
        )
        for offset in (1, 2)
    ]
    assert joined[0] != joined[1]


def test_without_images_the_parent_stays() -> None:
    assert image_parent(ROOT, [], HASH_SECRET_TEST) == ROOT


def test_a_digest_has_its_length() -> None:
    assert len(CAT) == DIGEST_BYTES
    with pytest.raises(ValueError, match="32 bytes"):
        image_parent(ROOT, [(0, b"short")], HASH_SECRET_TEST)
