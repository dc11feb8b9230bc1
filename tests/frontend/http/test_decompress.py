"""A compressed body comes out in bounded pieces, whole or with an error."""

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.frontend.http.decompress import BadCompression, Decompressor


def pieces(encoding, packed, most=1000):
    unpacker = Decompressor(encoding, packed)
    found = []
    while part := unpacker.piece(most):
        assert len(part) <= most
        found.append(part)
    return found


def raw_deflate(data):
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


@given(st.binary(max_size=3000), st.integers(1, 4000))
def test_what_was_packed_comes_out_in_pieces(data, most):
    for encoding, packed in (
        ("gzip", gzip.compress(data, mtime=0)),
        ("deflate", zlib.compress(data)),
        ("gzip", gzip.compress(data[:100], mtime=0) + gzip.compress(data[100:], mtime=0)),
    ):
        assert b"".join(pieces(encoding, packed, most)) == data


def test_some_clients_send_deflate_without_its_frame():
    assert b"".join(pieces("deflate", raw_deflate(b'{"a": 1}'))) == b'{"a": 1}'


def test_a_bomb_gives_no_more_at_once_than_was_asked_for():
    unpacker = Decompressor("gzip", gzip.compress(b" " * (8 << 20)))
    assert [len(unpacker.piece(4096)) for _ in range(3)] == [4096] * 3


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", b""),
        ("gzip", b"not gzip"),
        ("deflate", b"\xff" * 20),
        ("gzip", gzip.compress(b"x" * 9999, mtime=0)[:-6]),
        ("gzip", gzip.compress(b"x", mtime=0) + b"rest"),
        ("deflate", zlib.compress(b"x") + b"rest"),
    ],
)
def test_what_is_broken_or_cut_is_an_error(encoding, packed):
    with pytest.raises(BadCompression):
        pieces(encoding, packed)


def test_members_without_content_are_counted():
    with pytest.raises(BadCompression, match="too many members"):
        pieces("gzip", gzip.compress(b"") * 2000)
