"""Fetches images from URLs: only from public addresses, within bounds of size and time.

A name is looked up once for each connection; all its addresses are checked, and the connection goes
to one of those. So a name cannot mean another address between check and connection (DNS rebinding).
Redirects are followed here, each checked like the first URL. Nothing of the request or of earlier
fetches is sent along: no cookies, keys or proxies. The caller says which hosts are allowed.

Tenants share the places for fetches and the threads that look up names: pictures at a slow host
delay other pictures of their own tenant, and do not keep other tenants' from being fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from pdserve import __version__
from pdserve.errors import DeadlineExceeded, Draining, Overloaded
from pdserve.frontend.fair_semaphore import FairSemaphore
from pdserve.frontend.images.addresses import is_public
from pdserve.frontend.images.formats import UnreadableImage, read_size
from pdserve.frontend.images.sources import ImageRefused
from pdserve.text.fair_thread_pool import FairThreadPool

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from yarl import URL

    from pdserve.frontend.images.sources import MediaDomains
    from pdserve.ids import Bytes, Seconds

    Resolve = Callable[[str, int], Awaitable[list[str]]]
    """The addresses of a name, as texts, for connections to a port."""

__all__ = ["FetchesFull", "ImageFetcher"]

_REDIRECTS: Final = 3
_MOVED: Final = frozenset({301, 302, 303, 307, 308})
_CHUNK: Final[Bytes] = 64 * 1024
_HEAD: Final = 64
"""Bytes that tell a picture's type; a page of text ends the fetch here."""
_FETCHES: Final = 64
"""Most fetches at once. A tenant alone has half of them: two requests with as many images as the
default allows."""
_WAITING: Final = 512
"""Most images that wait for a place."""
_LOOKUPS: Final = 4
"""Threads that look up names, which cannot be interrupted; as many more are for tenants that have
no lookup under way."""
_LOOKUPS_WAITING: Final = 64
"""Most lookups that run or wait."""
_tenant: ContextVar[str] = ContextVar("_tenant", default="")
"""Whose fetch this is: the connector that asks for a name's addresses does not pass it on."""


class FetchesFull(Overloaded):
    """An image had no place to be fetched within its time, or too many wait for one."""


class ImageFetcher:
    """Fetches files. Used on one event loop's thread."""

    def __init__(
        self,
        domains: MediaDomains,
        most: Bytes,
        timeout: Seconds,
        *,
        resolve: Resolve | None = None,
        public: Callable[[str], bool] = is_public,
    ) -> None:
        """`most`: largest file. `timeout`: seconds for one image, redirects included, and as many
        before for its turn. `resolve` looks up names, and `public` judges addresses, for tests."""
        self._domains = domains
        self._most = most
        self._timeout = timeout
        self._public = public
        self._lookups = FairThreadPool(
            "pdserve-lookup", _LOOKUPS, _LOOKUPS_WAITING, spare=_LOOKUPS, seconds=timeout
        )
        self._resolve = resolve or self._look_up
        self.places = FairSemaphore(_FETCHES, _WAITING, self._crowded, time.monotonic)
        """Places for fetches."""
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self, text: str, reserve: Callable[[Bytes], None], tenant: str = "") -> bytes:
        """The file at a URL. `reserve` is called with the bytes that are about to be held.

        Errors: `ImageRefused`; `FetchesFull`; what `reserve` raises. Cancellation ends the
        connection, and the wait for a place.
        """
        url = self._domains.check(text)
        async with contextlib.AsyncExitStack() as held:
            await self._take_place(tenant, held)
            _tenant.set(tenant)
            try:
                async with asyncio.timeout(self._timeout):
                    return await self._follow(url, reserve)
            except TimeoutError:
                raise ImageRefused(
                    "slow", f"did not arrive within {self._timeout:g} s (--image-fetch-timeout)"
                ) from None
            except aiohttp.ClientError as error:
                raise ImageRefused("fetch", f"cannot be fetched: {_words(error)}") from None

    async def close(self) -> None:
        """End all fetches. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        self._lookups.stop()
        self._lookups.end()

    # ------------------------------------------------------------------ places

    async def _take_place(self, tenant: str, held: contextlib.AsyncExitStack) -> None:
        """Hold a place until `held` is closed. Errors: `FetchesFull`."""
        try:
            async with asyncio.timeout(self._timeout):
                await held.enter_async_context(self.places.of(tenant))
        except TimeoutError:
            own, all = self.places.running_of(tenant), self.places.running
            raise FetchesFull(
                f"an image had no turn to be fetched within {self._timeout:g} s "
                f"(--image-fetch-timeout): {all} are being fetched, {own} of them for this client; "
                "try again, or send images as 'data:' URLs",
                retry_after=self._timeout,
            ) from None

    def _crowded(self) -> FetchesFull:
        return FetchesFull(
            f"{_WAITING} images wait to be fetched, and this client's are the most; try again, or "
            "send images as 'data:' URLs",
            retry_after=self._timeout,
        )

    # ------------------------------------------------------------------ one image

    async def _follow(self, url: URL, reserve: Callable[[Bytes], None]) -> bytes:
        for _ in range(_REDIRECTS + 1):
            self._check_literal(url)
            async with self._open().get(url, allow_redirects=False) as answer:
                if answer.status not in _MOVED:
                    return await self._read(answer, reserve)
                target = answer.headers.get("Location", "")
            try:
                url = self._domains.check(str(url.join(type(url)(target))))
            except ValueError:
                raise ImageRefused("fetch", "is redirected to an invalid URL") from None
            except ImageRefused as error:
                raise ImageRefused(
                    error.reason, f"is redirected, and the target {error.message}"
                ) from None
        raise ImageRefused("fetch", f"is redirected more than {_REDIRECTS} times")

    async def _read(self, answer: Any, reserve: Callable[[Bytes], None]) -> bytes:
        if answer.status != 200:
            raise ImageRefused("fetch", f"cannot be fetched: its server answers {answer.status}")
        if answer.content_length is not None:
            self._check_size(answer.content_length)
        parts: list[bytes] = []
        size, told = 0, False
        async for part in answer.content.iter_chunked(_CHUNK):
            size += len(part)
            self._check_size(size)
            reserve(len(part))
            parts.append(part)
            if not told and size >= _HEAD:
                told = True
                _check_type(b"".join(parts))
        return b"".join(parts)

    def _check_size(self, size: Bytes) -> None:
        if size > self._most:
            raise ImageRefused(
                "size", f"has more than {self._most} bytes (--max-image-bytes): send a smaller one"
            )

    # ------------------------------------------------------------------ addresses

    def _check_literal(self, url: URL) -> None:
        """Check a host that is an address itself; names are checked when they are looked up."""
        host = url.raw_host or ""
        if (":" in host or host.replace(".", "").isdecimal()) and not self._public(host):
            raise _not_public(host)

    async def addresses(self, host: str, port: int) -> list[str]:
        """The addresses of a name, all of them public. Errors: `ImageRefused`."""
        found = await self._resolve(host, port)
        if not found:
            raise ImageRefused("fetch", f"cannot be fetched: {host[:100]!r} has no address")
        for address in found:
            if not self._public(address):
                raise _not_public(host)
        return found

    async def _look_up(self, host: str, port: int) -> list[str]:
        try:
            found = await self._lookups.submit(
                lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM),
                tenant=_tenant.get(),
            )
        except OSError as error:
            reason = error.strerror or str(error)
            raise ImageRefused("fetch", f"cannot be fetched: {host[:100]!r}: {reason}") from None
        except (DeadlineExceeded, Draining, Overloaded):
            raise ImageRefused("slow", "waits for too many names to be looked up") from None
        return [str(each[4][0]) for each in found]

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                resolver=_Checked(self), use_dns_cache=False, force_close=True, limit=_FETCHES
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
                headers={"Accept": "image/*", "Accept-Encoding": "identity"},
                skip_auto_headers=("User-Agent",),
                timeout=aiohttp.ClientTimeout(total=self._timeout),
            )
            self._session.headers["User-Agent"] = f"pdserve/{__version__}"
        return self._session


class _Checked(AbstractResolver):
    """Gives the connector the addresses that were checked, and no others."""

    def __init__(self, fetcher: ImageFetcher) -> None:
        self._fetcher = fetcher

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in await self._fetcher.addresses(host, port)
        ]

    async def close(self) -> None:
        """Nothing is open here."""


def _not_public(host: str) -> ImageRefused:
    return ImageRefused(
        "address",
        f"is at {host[:100]!r}, whose address is not public: send the image itself as a 'data:' "
        "URL",
    )


def _check_type(head: bytes) -> None:
    """End the fetch of what is no picture. A JPEG's size may come later."""
    try:
        read_size(head)
    except UnreadableImage as error:
        if "before its size" not in str(error):
            raise ImageRefused("type", f"is no picture: {error}") from None


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
