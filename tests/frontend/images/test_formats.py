"""The size of a picture is read from its first bytes; everything else is refused."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pdserve.frontend.images.formats import PictureSize, UnreadableImage, read_size
from tests.frontend.images.pictures import frame, gif, jpeg, png, segment, webp

SIZED = {
    "png": png,
    "jpeg": jpeg,
    "gif": gif,
    "webp": lambda width, height: webp(b"VP8X", width, height),
}


@given(st.integers(1, 16383), st.integers(1, 16383))
def test_sizes(width: int, height: int) -> None:
    for format, make in SIZED.items():
        assert read_size(make(width, height)) == PictureSize(format, width, height)  # type: ignore[arg-type]
    for kind in (b"VP8 ", b"VP8L"):
        assert read_size(webp(kind, width, height)) == PictureSize("webp", width, height)


@pytest.mark.parametrize(
    ("format", "options"),
    [
        *(("PNG", {}), ("GIF", {}), ("JPEG", {}), ("JPEG", {"progressive": True})),
        *(("WEBP", {}), ("WEBP", {"lossless": True}), ("WEBP", {"exif": b"Exif\0\0II*\0"})),
        ("JPEG", {"exif": b"Exif\0\0" + bytes(3000), "comment": b"x" * 40_000}),
    ],
)
@pytest.mark.parametrize("size", [(1, 1), (640, 33), (31, 700)])
def test_files_of_pillow(format: str, options: dict[str, Any], size: tuple[int, int]) -> None:
    file = io.BytesIO()
    Image.new("RGB", size, (9, 200, 30)).save(file, format, **options)
    found = read_size(file.getvalue())
    assert (found.format.upper(), found.width, found.height) == (format, *size)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "none of PNG, JPEG, GIF and WebP"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of PNG"),
        (b"%PDF-1.7", "none of PNG"),
        (b"BM" + bytes(60), "none of PNG"),
        (b"RIFF\0\0\0\0WAVEfmt " + bytes(60), "none of PNG"),
        (png()[:20], "PNG ends before its size"),
        (b"\x89PNG\r\n\x1a\n" + bytes(30), "does not begin with its header"),
        (png(0, 5), "0 by 5 pixels"),
        (gif(3, 0), "3 by 0 pixels"),
        (webp(b"VP8X")[:25], "WEBP ends before its size"),
        (webp(b"VP8 ").replace(b"\x9d\x01\x2a", b"abc"), "no picture where it should begin"),
        (webp(b"VP8L").replace(b"\x2f", b"x"), "no lossless picture"),
        (webp(b"ALPH"), "unknown part"),
        (jpeg()[:30], "JPEG ends before its size"),
        (jpeg(before=frame(9, 9)), "says its size twice"),
        (b"\xff\xd8" + segment(0xDA, bytes(10)) + bytes(99), "no size before its picture"),
        (b"\xff\xd8\xff\xe0\0\x02 picture", "no segment where one should begin"),
        (jpeg(before=segment(0xFE, b"") * 300), "256 segments"),
        (jpeg(before=b"\xff" * 300), "256 segments"),
    ],
)
def test_what_is_no_picture(data: bytes, words: str) -> None:
    with pytest.raises(UnreadableImage, match=words):
        read_size(data)


def test_a_jpegs_own_picture_inside_of_it_does_not_count() -> None:
    """Cameras put a small one into a segment."""
    inside = segment(0xE1, b"Exif\0\0" + jpeg(160, 120))
    assert read_size(jpeg(4000, 3000, before=inside)) == PictureSize("jpeg", 4000, 3000)


@given(
    st.sampled_from([png(), jpeg(), gif(), webp(b"VP8 "), webp(b"VP8L"), webp(b"VP8X")]), st.data()
)
def test_any_bytes_are_read_or_refused(file: bytes, data: st.DataObject) -> None:
    broken = bytearray(file)
    for _ in range(data.draw(st.integers(0, 4))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(broken[: data.draw(st.integers(0, len(broken)))])
    try:
        found = read_size(cut)
    except UnreadableImage:
        return
    assert found.width > 0
    assert found.height > 0
