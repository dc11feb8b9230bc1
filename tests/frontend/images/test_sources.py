"""Where images may be: inside of the request, and at hosts that the operator allows."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.frontend.images.sources import (
    ImageRefused,
    MediaDomains,
    data_size,
    decode_data,
    is_data,
)
from tests.frontend.images.pictures import data_url

SOME = MediaDomains.of(["Pictures.example.", "*.cdn.example", "93.184.216.34", ""])
ALL = MediaDomains.of(["*"])


@given(st.binary(min_size=1, max_size=100))
def test_data_urls(file: bytes) -> None:
    for kind in ("image/png", "image/svg+xml", ""):
        url = data_url(file, kind)
        assert is_data(url)
        assert decode_data(url) == file
        assert len(file) <= data_size(url)
    assert data_size(data_url(file, "")) <= len(file) + 20


def test_other_forms_of_data_urls() -> None:
    coded = base64.b64encode(b"picture").decode()
    for url in (
        f"DATA:image/PNG;BASE64,{coded}",
        f"data:image/png;name=a.png;base64,{coded}",
        f"data:;base64,{coded}",
    ):
        assert is_data(url)
        assert decode_data(url) == b"picture"


@pytest.mark.parametrize(
    ("url", "reason", "words"),
    [
        ("data:", "url", "no 'data:' URL"),
        ("data:image/png;base64", "url", "no 'data:' URL"),
        ("data:image/png,abc", "url", "no base64"),
        ("data:text/html;base64,YWJj", "type", "'text/html'"),
        ("data:application/octet-stream;base64,YWJj", "type", "send an image"),
        ("data:image/png;base64,YW Jj", "url", "no valid base64"),
        ("data:image/png;base64,YWJ", "url", "no valid base64"),
        ("data:image/png;base64,YWJ\N{LATIN SMALL LETTER E WITH ACUTE}", "url", "no valid base64"),
        ("data:image/png;base64,", "url", "is empty"),
        ("data:" + ";" * 1000 + ",abc", "url", "no 'data:' URL"),
        ("data:" + "a" * 100_000, "url", "no 'data:' URL"),
    ],
)
def test_broken_data_urls(url: str, reason: str, words: str) -> None:
    with pytest.raises(ImageRefused, match=words) as caught:
        decode_data(url)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "url",
    [
        "https://pictures.example/a.png",
        "http://PICTURES.example./a.png?size=2",
        "https://eu.cdn.example:8443/a",
        "http://a.b.cdn.example/",
        "https://93.184.216.34/a.png",
    ],
)
def test_allowed_hosts(url: str) -> None:
    assert SOME.check(url).raw_path
    assert ALL.check(url).raw_path


def test_a_fragment_is_not_sent() -> None:
    assert str(ALL.check("https://a.example/x#secret")) == "https://a.example/x"


@pytest.mark.parametrize(
    "url",
    [
        "https://other.example/",
        "https://cdn.example/",
        "https://pictures.example.evil.test/",
        "https://evil.test/pictures.example",
        "https://evil.test?pictures.example",
        "https://evil.test#pictures.example",
        "https://93.184.216.35/",
    ],
)
def test_other_hosts(url: str) -> None:
    with pytest.raises(ImageRefused, match="--allowed-media-domains"):
        SOME.check(url)
    assert ALL.check(url)
    with pytest.raises(ImageRefused, match="'data:' URL"):
        MediaDomains.of([]).check(url)


@pytest.mark.parametrize(
    "url",
    [
        *("file:///etc/passwd", "FILE:///etc/passwd", "ftp://a.example/", "gopher://a.example/"),
        *("/etc/passwd", "a.png", "", "javascript:alert(1)", "blob:https://a.example/1"),
        *("http:///a", "https://", "https://user@a.example/", "https://u:p@a.example/"),
        *("http://a.example:0/", "http://a.example:99999/", "http://[::1/", "http://a b.example/"),
        *("http://2130706433/", "http://0x7f000001/", "http://0x7f.1/", "http://017700000001/"),
        *("http://127.1/", "http://0177.0.0.1/", "http://127.0.0.1.:80/", "http://1.2.3/"),
        *("http://0/", "http://0x0/", "http://999.1.1.1.1/", "http://a..example/", "http://-/"),
        *("http://%31%32%37.0.0.1/", "http://a_\N{FULLWIDTH DIGIT ONE}.0x1/", "x" * 9000),
        "https://a.example/" + "x" * 9000,
    ],
)
def test_urls_that_are_never_fetched(url: str) -> None:
    try:
        found = ALL.check(url)
    except ImageRefused as refused:
        caught = refused
    else:
        # What is left is an address that the fetcher judges.
        assert found.raw_host in ("127.0.0.1", "127.0.0.1.")
        return
    assert caught.reason in ("url", "address")


@given(st.text(max_size=60))
def test_any_text_is_refused_or_a_plain_url(text: str) -> None:
    for url in (text, "http://" + text, "https://a.example/" + text):
        try:
            found = ALL.check(url)
        except ImageRefused:
            continue
        assert found.scheme in ("http", "https")
        assert found.raw_host
        assert found.user is None
