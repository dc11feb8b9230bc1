"""Takes the images of a request: finds them in its messages, loads and checks them, holds them.

A loaded image is its file, its digest and its size in pixels; nothing is decoded here. Files are
held as long as their request lives, since another worker may have to continue it; all requests'
together have a bound. Work on files runs in the text pool's threads.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.blocks.image_hashes import image_digest
from pdserve.errors import InvalidRequest, Overloaded
from pdserve.frontend.images.fetcher import FetchesFull, ImageFetcher
from pdserve.frontend.images.formats import UnreadableImage, read_size
from pdserve.frontend.images.image_tokens import ImageTokens, LoadedImage
from pdserve.frontend.images.sources import (
    ImageRefused,
    MediaDomains,
    data_size,
    decode_data,
    is_data,
)
from pdserve.frontend.preprocess.error_fields import InOwnTerms
from pdserve.protocols.completion_requests import ContentPart, ImageUrl, Message, PlacedPart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.frontend.access.api_keys import ApiKey
    from pdserve.frontend.config import FrontendConfig
    from pdserve.frontend.images.fetcher import Resolve
    from pdserve.ids import Bytes
    from pdserve.messages.card import ModelCard
    from pdserve.observe.metrics import Metrics
    from pdserve.text.text_pool import TextWork

__all__ = [
    "ImageIntake",
    "ImageLoader",
    "count_parts",
    "find_images",
    "image_error",
    "without_files",
]

_REQUEST: Final[Bytes] = 48 << 20
"""Most bytes of one request's images: the request travels to a worker as one message of at most
`MAX_MESSAGE_BYTES`."""
_BYTES_PER_CHAR: Final = 128
"""Bytes of a file whose decoding and hashing take as long as a character of text."""
_PART: Final = "image_url"


def count_parts(messages: Sequence[Message]) -> int:
    """Parts of all messages. Looking at each takes as long as a character of text to tokenize."""
    return sum(len(message.content) for message in messages if isinstance(message.content, list))


def find_images(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """(place, URL) of each image, in the order of the conversation.

    Errors: `InvalidRequest` for an image without a URL, and for a part of the form in which
    templates get images, which has no image.
    """
    found = []
    for index, message in enumerate(messages):
        for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type == _PART:
                found.append(_image(part, f"messages[{index}].content[{number}].image_url"))
            elif part.type == "image":
                where = f"messages[{index}].content[{number}].type"
                raise InvalidRequest(
                    f"'{where}': parts of type 'image' are not supported; use 'image_url'",
                    param=where,
                )
    return found


def _image(part: ContentPart, usual: str) -> tuple[str, str]:
    where = _place(part, usual)
    url = part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url
    if not url:
        raise image_error(where, f"'{where}' is required, with its 'url'")
    return where, url


def _place(part: ContentPart, usual: str) -> str:
    return part.where if isinstance(part, PlacedPart) else usual


def image_error(where: str, message: str) -> InvalidRequest:
    """The error about one image. What an adapter has placed keeps its name."""
    return InOwnTerms(message, param=where)


def without_files(messages: Sequence[Message], bare: ContentPart) -> list[Message]:
    """The messages as a template sees them: `bare` stands for each image."""
    return [
        replace(message, content=[bare if part.type == _PART else part for part in message.content])
        if isinstance(message.content, list)
        else message
        for message in messages
    ]


class ImageLoader:
    """Loads the images of all requests. Owned by the service, on its event loop's thread."""

    def __init__(
        self, config: FrontendConfig, metrics: Metrics, *, resolve: Resolve | None = None
    ) -> None:
        self.tokens = ImageTokens()
        self.held: Bytes = 0
        """Bytes of all requests' images."""
        self.metrics = metrics
        self.config = config
        self.fetcher = ImageFetcher(
            MediaDomains.of(config.allowed_media_domains),
            config.max_image_bytes,
            config.image_fetch_timeout,
            resolve=resolve,
        )
        self._numbers = itertools.count()
        places = self.fetcher.places
        metrics.image_fetches.labels("running").read_from(lambda: places.running)
        metrics.image_fetches.labels("waiting").read_from(lambda: places.waiting)

    def intake(self, key: ApiKey | None = None) -> ImageIntake:
        """The images of one request; its owner calls `release`. The key's tenant shares the fetches
        with other tenants; a request without a key shares them as if it were a tenant."""
        # No tenant's name begins with a control character. Among equals a name decides: the first
        # request is the first.
        return ImageIntake(self, f"\0{next(self._numbers):016x}" if key is None else key.tenant)

    async def close(self) -> None:
        """End all fetches."""
        await self.fetcher.close()


class ImageIntake:
    """The images of one request."""

    def __init__(self, loader: ImageLoader, tenant: str) -> None:
        self._loader = loader
        self._tenant = tenant
        self._held: Bytes = 0

    @property
    def tokens(self) -> ImageTokens:
        """How many tokens images take."""
        return self._loader.tokens

    @property
    def metrics(self) -> Metrics:
        """Where images are counted."""
        return self._loader.metrics

    def release(self) -> None:
        """Give the memory back. Idempotent."""
        self._loader.held -= self._held
        self._held = 0

    async def load(
        self, found: Sequence[tuple[str, str]], card: ModelCard, pool: TextWork
    ) -> list[LoadedImage]:
        """The images of `find_images`. The first failure ends all.

        Errors: `InvalidRequest` names the part, the cause and the remedy; `Overloaded` if the
        images of all requests take too much memory or fetches, and those of the pool.
        """
        self._check_count(found, card)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._load(*each, pool)) for each in found]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _check_count(self, found: Sequence[tuple[str, str]], card: ModelCard) -> None:
        allowed = self._loader.config.max_images
        model = allowed if card.image is None else card.image.most
        if len(found) > (most := min(allowed, model)):
            self._count("count")
            whose = "the model takes" if model < allowed else "--max-images allows"
            where = found[most][0]
            raise image_error(
                where, f"'{where}' is one of {len(found)} images; {whose} {most}: leave it out"
            )

    async def _load(self, where: str, url: str, pool: TextWork) -> LoadedImage:
        source = "data" if is_data(url) else "url"
        try:
            if source == "data":
                self._check_data(url)
                data = await pool.run(len(url) // _BYTES_PER_CHAR, decode_data, url)
            else:
                data = await self._loader.fetcher.fetch(url, self._reserve, self._tenant)
            image = await pool.run(len(data) // _BYTES_PER_CHAR, self._examine, data)
        except ImageRefused as error:
            self._count(error.reason)
            raise image_error(where, f"'{where}' {error.message}") from None
        except FetchesFull:
            self._count("busy")
            raise
        self.metrics.request_images.labels(source).inc()
        return image

    def _check_data(self, url: str) -> None:
        size, most = data_size(url), self._loader.config.max_image_bytes
        if size > most + 4:
            raise ImageRefused(
                "size", f"has about {size} bytes; {most} are allowed (--max-image-bytes)"
            )
        self._reserve(size)

    def _reserve(self, size: Bytes) -> None:
        loader = self._loader
        if self._held + size > _REQUEST:
            raise ImageRefused(
                "size", f"is too much: the images of a request may have {_REQUEST} bytes together"
            )
        if loader.held + size > loader.config.max_image_memory:
            self._count("memory")
            raise Overloaded(
                "too many images are held for other requests (--max-image-memory)",
                retry_after=loader.config.retry_after,
            )
        self._held += size
        loader.held += size

    def _examine(self, data: bytes) -> LoadedImage:
        """Check a file, in a thread. Errors: `ImageRefused`."""
        try:
            size = read_size(data)
        except UnreadableImage as error:
            raise ImageRefused("type", f"is no picture: {error}") from None
        most = self._loader.config.max_image_pixels
        if size.width * size.height > most:
            raise ImageRefused(
                "pixels",
                f"has {size.width} by {size.height} pixels; {most} are allowed "
                "(--max-image-pixels): send a smaller one",
            )
        return LoadedImage(data, image_digest(data), size.width, size.height)

    def _count(self, reason: str) -> None:
        self.metrics.images_refused.labels(reason).inc()
