"""Reads where an image of a request is: inside of the request (`data:`), or at a URL.

Which URLs may be fetched is the operator's word (`--allowed-media-domains`), by host name. What the
name's addresses are is checked when they are known (`fetcher.py`). Pure.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from yarl import URL

from pdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.ids import Bytes

__all__ = ["ImageRefused", "MediaDomains", "RefusalReason", "data_size", "decode_data", "is_data"]

RefusalReason = Literal[
    "url", "address", "fetch", "slow", "size", "type", "pixels", "count", "memory"
]
"""Label of the metric `images_refused`."""

_MAX_URL: Final = 8192
"""Longest URL of an image that is fetched."""
_DATA: Final = "data:"
_HEAD: Final = re.compile(r"data:([^;,]{0,100})((?:;[^;,]{0,100}){0,4}),", re.IGNORECASE)
_NAME: Final = re.compile(r"(?=.*[a-z])[a-z0-9_]([a-z0-9_-]*)(\.[a-z0-9_]([a-z0-9_-]*))*")
"""A host name in ASCII. One of digits only, or in hexadecimal, would be read as an address."""
_NUMBER: Final = re.compile(r"(0x[0-9a-f]*|[0-9]+)")

_BYTE: Final = re.compile(r"0|[1-9][0-9]{0,2}")


class ImageRefused(InvalidRequest):
    """An image of a request is refused; the caller says which."""

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason: RefusalReason = reason


def is_data(url: str) -> bool:
    """True for an image inside of its URL."""
    return url[: len(_DATA)].lower() == _DATA


def data_size(url: str) -> Bytes:
    """Most bytes that a `data:` URL can hold."""
    return 3 * (len(url) // 4 + 1)


def decode_data(url: str) -> bytes:
    """The bytes of a `data:` URL; takes 2 ms for a megabyte. Errors: `ImageRefused`."""
    head = _HEAD.match(url)
    if head is None:
        raise ImageRefused("url", "is no 'data:' URL: write data:image/png;base64,…")
    kind, options = head[1].strip().lower(), head[2].lower()
    if kind and not kind.startswith("image/"):
        raise ImageRefused("type", f"is of type {kind!r}: send an image")
    if not options.replace(" ", "").endswith(";base64"):
        raise ImageRefused("url", "is no base64 data: write data:image/png;base64,…")
    try:
        data = base64.b64decode(url[head.end() :].encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError, ValueError) as error:
        raise ImageRefused("url", f"holds no valid base64: {error}") from None
    if not data:
        raise ImageRefused("url", "is empty")
    return data


@dataclass(frozen=True, slots=True)
class MediaDomains:
    """Hosts from which images may be fetched."""

    names: frozenset[str]
    below: tuple[str, ...]
    """Endings of names, each with its dot."""
    all: bool

    @classmethod
    def of(cls, names: Iterable[str]) -> MediaDomains:
        """`names`: host names; `*.name` is everything below it, `*` everything. Empty: none."""
        lower = [name.lower().rstrip(".") for name in names if name]
        plain = frozenset(name for name in lower if not name.startswith("*"))
        below = tuple(name[1:] for name in lower if name.startswith("*."))
        return cls(plain, below, "*" in lower)

    def check(self, text: str) -> URL:
        """The URL to fetch. Errors: `ImageRefused` names the cause and the remedy."""
        if len(text) > _MAX_URL:
            raise ImageRefused("url", f"is a URL of {len(text)} characters; {_MAX_URL} are allowed")
        scheme = text.partition(":")[0].lower()
        if scheme not in ("http", "https"):
            raise ImageRefused(
                "url", f"has the scheme {scheme[:20]!r}: send the image itself as a 'data:' URL"
            )
        try:
            url = URL(text)
            host = (url.raw_host or "").rstrip(".").lower()
            plain = bool(host) and url.user is None and url.password is None and bool(url.port)
        except ValueError as error:
            raise ImageRefused("url", f"is no valid URL: {str(error)[:100]}") from None
        if not plain:
            raise ImageRefused("url", "is a URL without a host, or with a user's name")
        if not (self.all or host in self.names or host.endswith(self.below or ("\0",))):
            raise ImageRefused(
                "url",
                f"is at {host[:100]!r}, from which this server fetches nothing: send the image "
                "itself as a 'data:' URL (the operator allows hosts by --allowed-media-domains)",
            )
        if ":" not in host and not _is_name(host) and not _is_dotted(host):
            raise ImageRefused("address", f"is at {host[:100]!r}, which is no usual host name")
        return url.with_fragment(None)


def _is_name(host: str) -> bool:
    """True for a name, which the last label tells apart from an address in any notation."""
    last = host.rpartition(".")[2]
    return _NAME.fullmatch(host) is not None and _NUMBER.fullmatch(last) is None


def _is_dotted(host: str) -> bool:
    """True for an IPv4 address of four decimal numbers."""
    parts = host.split(".")
    return len(parts) == 4 and all(map(_BYTE.fullmatch, parts))
