"""XXH3-64 against values of the reference implementation, and the chain that Dynamo makes of it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve import accel
from pdserve.blocks.hashing import pack_tokens
from pdserve.blocks.public import PUBLIC_SEED, public_hashes, public_pure, xxh3_64

if TYPE_CHECKING:
    from collections.abc import Callable

    Public = Callable[[bytes | memoryview, int, int], tuple[bytes, bytes]]

needs_native = pytest.mark.skipif(not accel.NATIVE, reason=accel.REASON)
TWINS = [
    pytest.param(public_pure, id="pure"),
    pytest.param(
        accel.native.public_hashes if accel.NATIVE else None, id="native", marks=needs_native
    ),
]

REFERENCE: dict[int, tuple[tuple[int, int], ...]] = {
    0: (
        (4, 0xED503340C589A28B),
        (8, 0xE5B43AB074C9C13B),
        (12, 0x7376B216CD615AC7),
        (16, 0x0A0EC5AE8679CB7F),
        (20, 0x9F3BC617F05EBFCA),
        (32, 0x8E62A5F67100F10D),
        (36, 0xE12ADA4032754473),
        (64, 0x7714914B0D794113),
        (68, 0xD15C8755D8E00241),
        (96, 0x7F316343F379455B),
        (100, 0x387363CE0E6084AA),
        (128, 0x696069C4F1E6A91A),
        (132, 0xFBBE1FCB0F2E7AF4),
        (240, 0xB80284837259EEE4),
        (244, 0x99C4E381D5B4343C),
        (256, 0x266A2C816CBB31C5),
        (512, 0xB3CE5ABEFEB930B1),
        (1024, 0xD1ABB5DBD52032F9),
        (1028, 0x5BB7C231CAF9776A),
        (1088, 0x73A4A4F20D1ADA67),
        (2048, 0x597CEFA098478059),
        (5000, 0x4DF419AB59E5A7AD),
    ),
    1337: (
        (4, 0xEBD782098937B86D),
        (8, 0x31FDF9BB4559E63F),
        (12, 0x0DBA4CD4FCCFA846),
        (16, 0xBB47EB6C6809D598),
        (20, 0xAA9A9E1515F58BB9),
        (32, 0xEEA23F2C395711F3),
        (36, 0xF36AF182F9D5282B),
        (64, 0xF668D89C0FBF039B),
        (68, 0x86B22C01DB75B745),
        (96, 0x80ABF9C589659A7E),
        (100, 0x982486FD9FC9EB43),
        (128, 0x98A85BC4E2A13F06),
        (132, 0xB86CD73E4E778CC3),
        (240, 0xEB9E3F0B313B2BD3),
        (244, 0x9D5983CDA0B4E4C1),
        (256, 0x923417FC63B784AA),
        (512, 0x36B0E0EF53761C2A),
        (1024, 0x83381D116FD51EE8),
        (1028, 0x459A4D5724C4CA32),
        (1088, 0x0AF07DD6F34270F8),
        (2048, 0xA1F86E3572939650),
        (5000, 0x73667A2556295EB8),
    ),
    18446744073709551615: (
        (4, 0x4827BEC53FFEEEDF),
        (8, 0x42F073EE19E1AE6A),
        (12, 0x1973D21CAD12340F),
        (16, 0xC956F7F7AAF07FF3),
        (20, 0x712D253224AFD21D),
        (32, 0x7806E05498BDDA5B),
        (36, 0x41BE3B4EFB9380D3),
        (64, 0x4762040D3319366C),
        (68, 0x4597C8866BAE0830),
        (96, 0x904AA5D0890231FF),
        (100, 0x50A7FD14961FBA59),
        (128, 0x05ADB55D98255CF1),
        (132, 0x788381FEC009CEF4),
        (240, 0xA21E77429B7AB1B8),
        (244, 0xA6E294FC3BBB27ED),
        (256, 0x32D1D5AEFBE7EDAE),
        (512, 0xF4F4EC06A4084D59),
        (1024, 0xD69A4E344293282E),
        (1028, 0x8D20295DECEEBC3B),
        (1088, 0x6E56D035CD1049C9),
        (2048, 0xFEEA7EDDB8F7DE1C),
        (5000, 0x1BEDCBB0E48C0BBF),
    ),
}
"""By seed: (bytes, XXH3-64) as the package xxhash 4.1.0 computes it."""


def sample(size: int) -> bytes:
    return bytes((i * 131 + (i >> 8) * 7) & 255 for i in range(size))


def words(joined: bytes) -> list[int]:
    return [int.from_bytes(joined[at : at + 8], "little") for at in range(0, len(joined), 8)]


@pytest.mark.parametrize("public", TWINS)
class TestBothTwins:
    @pytest.mark.parametrize("seed", REFERENCE)
    def test_every_length_has_the_reference_value(self, public: Public, seed: int) -> None:
        for size, expected in REFERENCE[seed]:
            local, sequence = public(sample(size), size // 4, seed)
            assert words(local) == words(sequence) == [expected], size

    def test_dynamos_own_value(self, public: Public) -> None:
        """Of `compute_block_hash_for_seq([1] * 64, 16)`, ai-dynamo-runtime 1.6."""
        local, _ = public(pack_tokens([1] * 64), 16, PUBLIC_SEED)
        assert words(local) == [13518392937921988335] * 4

    def test_the_chain_is_a_hash_of_hashes(self, public: Public) -> None:
        local, sequence = public(pack_tokens(range(12)), 4, PUBLIC_SEED)
        first, second, third = words(local)
        chained = [first]
        for own in (second, third):
            pair = chained[-1].to_bytes(8, "little") + own.to_bytes(8, "little")
            chained.append(xxh3_64(pair, PUBLIC_SEED))
        assert words(sequence) == chained

    def test_only_full_blocks_are_hashed(self, public: Public) -> None:
        assert public(b"", 4, 0) == (b"", b"")
        assert public(pack_tokens([1, 2, 3]), 4, 0) == (b"", b"")
        assert len(public(pack_tokens([1] * 11), 4, 0)[0]) == 16

    @pytest.mark.parametrize(("tokens", "size"), [(b"", 0), (b"\0\0\0", 1)])
    def test_refuses(self, public: Public, tokens: bytes, size: int) -> None:
        with pytest.raises(ValueError, match=r"block_size|tokens"):
            public(tokens, size, 0)


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=300),
    st.integers(1, 130),
    st.integers(0, 2**64 - 1),
)
def test_twins_agree(tokens: list[int], size: int, seed: int) -> None:
    expected = public_pure(pack_tokens(tokens), size, seed)
    assert public_hashes(tokens, size, seed) == expected
    assert public_hashes(array("I", tokens), size, seed) == expected
