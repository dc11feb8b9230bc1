"""Block hashes: the definition, what they tell apart, and the native and pure twins' agreement."""

from __future__ import annotations

import struct
from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve import accel
from pdserve.blocks.hashing import (
    HASH_BYTES,
    HASH_SECRET_TEST,
    block_hashes,
    block_hashes_pure,
    hash_secret_id,
    joined_hashes,
    pack_tokens,
    prompt_root,
    root_hash,
    short_hashes,
    short_hashes_pure,
    split_hashes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Chain = Callable[[bytes | memoryview, int, bytes, bytes], bytes]

ROOT = root_hash(HASH_SECRET_TEST, "model", None, None)

needs_native = pytest.mark.skipif(not accel.NATIVE, reason=accel.REASON)
TWINS = [
    pytest.param(block_hashes_pure, id="pure"),
    pytest.param(
        accel.native.block_hashes if accel.NATIVE else None, id="native", marks=needs_native
    ),
]


def hashes(tokens: Sequence[int], block_size: int = 4, parent: bytes = ROOT) -> list[bytes]:
    return [*block_hashes(tokens, block_size, parent=parent, secret=HASH_SECRET_TEST)]


class TestDefinition:
    def test_root_is_keyed_blake2b_of_the_salt(self) -> None:
        fields = b"".join(struct.pack("<I", len(f)) + f for f in (b"model", b"lora"))
        message = b"pdserve root v1\0" + fields + b"\xff\xff\xff\xff"
        expected = blake2b(message, digest_size=16, key=HASH_SECRET_TEST).digest()
        assert root_hash(HASH_SECRET_TEST, "model", "lora", None) == expected

    def test_each_block_is_keyed_blake2b_of_its_parent_and_tokens(self) -> None:
        tokens = [1, 2, 3, 0xFFFFFFFF, 5, 6, 7, 8]
        first = blake2b(digest_size=16, key=HASH_SECRET_TEST)
        first.update(ROOT + struct.pack("<4I", *tokens[:4]))
        second = blake2b(digest_size=16, key=HASH_SECRET_TEST)
        second.update(first.digest() + struct.pack("<4I", *tokens[4:]))
        assert hashes(tokens) == [first.digest(), second.digest()]

    def test_values_are_fixed(self) -> None:
        # Names outlive processes (disk tiers, other versions): a change here needs a new tag.
        (only,) = hashes(list(range(32)), block_size=32)
        assert only.hex() == "ee7f37626595372019e29cd0ab9a6347"


class TestNames:
    def test_joined_hashes_are_the_hashes_joined(self) -> None:
        tokens = list(range(13))
        joined = joined_hashes(tokens, 4, parent=ROOT, secret=HASH_SECRET_TEST)
        assert joined == b"".join(hashes(tokens))
        assert split_hashes(joined) == hashes(tokens)

    def test_a_short_name_is_the_first_half(self) -> None:
        assert short_hashes(bytes(range(32))) == bytes((*range(8), *range(16, 24)))
        assert short_hashes(b"") == b""

    @pytest.mark.parametrize("short", [short_hashes, short_hashes_pure])
    def test_half_a_hash_has_no_short_name(self, short: Callable[[bytes], bytes]) -> None:
        with pytest.raises(ValueError, match="16 bytes"):
            short(bytes(24))

    @needs_native
    @given(st.binary(max_size=400).map(lambda data: data[: len(data) // 16 * 16]))
    def test_short_twins_agree(self, joined: bytes) -> None:
        assert short_hashes(joined) == short_hashes_pure(joined)

    def test_a_secrets_id_is_short_and_its_own(self) -> None:
        assert hash_secret_id(HASH_SECRET_TEST).hex() == "6696bfa604d8c3b1"
        assert hash_secret_id(b"a") != hash_secret_id(b"b")

    def test_a_prompts_root_is_made_of_model_adapter_and_salt(self) -> None:
        secret = HASH_SECRET_TEST
        assert prompt_root(secret, "model", "") == ROOT
        assert prompt_root(secret, "model", "s", "l") == root_hash(secret, "model", "l", "s")


class TestMeaning:
    def test_only_full_blocks_have_a_name(self) -> None:
        assert hashes([]) == []
        assert hashes([1, 2, 3]) == []
        assert len(hashes([1] * 11)) == 2

    def test_a_chain_continues_from_its_parent(self) -> None:
        tokens = list(range(24))
        head, tail = tokens[:8], tokens[8:]
        assert hashes(head) + hashes(tail, parent=hashes(head)[-1]) == hashes(tokens)

    def test_a_name_covers_everything_before_it(self) -> None:
        one, other = hashes([1, 2, 3, 4, 9, 9, 9, 9]), hashes([1, 2, 3, 5, 9, 9, 9, 9])
        assert one[1] != other[1]

    @pytest.mark.parametrize(
        "salt",
        [("model",), ("model", ""), ("model", None), ("mode", "l"), ("", "model"), ("other",)],
    )
    def test_salt_fields_do_not_run_together(self, salt: tuple[str | None, ...]) -> None:
        others = {
            root_hash(HASH_SECRET_TEST, *other)
            for other in [("model", "", ""), ("m", "odel"), (None, "model"), ("model", None, None)]
        }
        assert root_hash(HASH_SECRET_TEST, *salt) not in others

    def test_another_secret_gives_other_names(self) -> None:
        tokens = [1, 2, 3, 4]
        assert block_hashes(tokens, 4, parent=ROOT, secret=b"another") != hashes(tokens)

    @pytest.mark.parametrize("token", [-1, 2**32, 2**64])
    def test_tokens_are_u32(self, token: int) -> None:
        with pytest.raises(OverflowError):
            hashes([token] * 4)
        with pytest.raises(OverflowError):
            hashes([1, 1, 1, 1, token])  # even where no full block is

    def test_tokens_are_ints(self) -> None:
        with pytest.raises(TypeError):
            hashes([1.0] * 4)  # type: ignore[list-item]

    @given(st.lists(st.sampled_from([0, 1, 2**15, 2**30 - 1, 2**30, 2**31, 2**32 - 1])))
    def test_it_is_one_whatever_holds_the_tokens(self, tokens: list[int]) -> None:
        expected = hashes(tokens)
        for held in (tuple(tokens), array("I", tokens), range(0)):
            if len(held) == len(tokens):
                assert hashes(held) == expected
        packed = block_hashes_pure(pack_tokens(tokens), 4, HASH_SECRET_TEST, ROOT)
        assert packed == b"".join(expected)


@pytest.mark.parametrize("chain", TWINS)
class TestBothTwins:
    """One class over both implementations: same answers, same refusals."""

    # Around 28 tokens the message starts to need a second BLAKE2b chunk, at 60 a third.
    @pytest.mark.parametrize("block_size", [1, 4, 27, 28, 29, 32, 59, 60, 61, 64, 1024])
    def test_agrees_with_the_definition(self, chain: Chain, block_size: int) -> None:
        data = pack_tokens(range(3 * block_size + block_size // 2))
        parent, expected = bytes(ROOT), b""
        for start in range(0, 12 * block_size, 4 * block_size):
            message = parent + data[start : start + 4 * block_size]
            parent = blake2b(message, digest_size=HASH_BYTES, key=HASH_SECRET_TEST).digest()
            expected += parent
        assert chain(data, block_size, HASH_SECRET_TEST, ROOT) == expected

    @pytest.mark.parametrize("secret", [b"x", b"s" * 63, b"s" * 64])
    def test_takes_secrets_of_any_legal_length(self, chain: Chain, secret: bytes) -> None:
        expected = blake2b(bytes(ROOT) + b"\1\0\0\0", digest_size=16, key=secret).digest()
        assert chain(b"\1\0\0\0", 1, secret, ROOT) == expected

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ((b"", 0, HASH_SECRET_TEST, ROOT), "block_size"),
            ((b"", 1, b"", ROOT), "secret"),
            ((b"", 1, b"s" * 65, ROOT), "secret"),
            ((b"", 1, HASH_SECRET_TEST, ROOT[:15]), "parent"),
            ((b"\0\0\0", 1, HASH_SECRET_TEST, ROOT), "tokens"),
        ],
    )
    def test_refuses(self, chain: Chain, arguments: tuple[bytes, int, bytes, bytes], words: str):
        with pytest.raises(ValueError, match=words):
            chain(*arguments)

    def test_reads_any_contiguous_buffer(self, chain: Chain) -> None:
        data = pack_tokens(range(64))
        view = memoryview(array("I", range(64)))
        assert chain(view, 32, HASH_SECRET_TEST, ROOT) == chain(data, 32, HASH_SECRET_TEST, ROOT)


@needs_native
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=300),
    block_size=st.integers(1, 130),
    secret=st.binary(min_size=1, max_size=64),
    parent=st.binary(min_size=16, max_size=16),
)
def test_twins_agree(tokens: list[int], block_size: int, secret: bytes, parent: bytes) -> None:
    data = pack_tokens(tokens)
    native = accel.native.block_hashes(data, block_size, secret, parent)
    assert native == block_hashes_pure(data, block_size, secret, parent)
