"""The images of a request are found, loaded, checked and held within bounds."""

from __future__ import annotations

import base64
import itertools
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.blocks.image_hashes import image_digest
from pdserve.errors import InvalidRequest, Overloaded
from pdserve.frontend.access.api_keys import ApiKey
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.fair_semaphore import FairSemaphore
from pdserve.frontend.images.fetcher import FetchesFull
from pdserve.frontend.images.image_tokens import LoadedImage
from pdserve.frontend.images.loader import (
    ImageLoader,
    count_parts,
    find_images,
    without_files,
)
from pdserve.messages.card import ImagePlaceholder, ModelCard
from pdserve.observe.metrics import Metrics
from pdserve.protocols.completion_requests import ContentPart, Message
from pdserve.text.text_pool import TextPool
from tests.frontend.images.pictures import data_url, jpeg, png, user
from tests.frontend.support import card

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KEY = ApiKey(digest=b"", tenant="acme")
SEES = ImagePlaceholder(token=5, text="<image>", most=4)


@pytest.fixture
async def pool() -> AsyncIterator[TextPool]:
    pool = TextPool()
    yield pool
    await pool.close()


def messages(*each: dict[str, object]) -> list[Message]:
    return msgspec.convert(list(each), list[Message])


def model(**changes: Any) -> ModelCard:
    return card(**({"features": ("images",), "image": SEES} | changes))


class Loading:
    """A loader, and one request at a time."""

    def __init__(self, pool: TextPool, **config: Any) -> None:
        self.metrics = Metrics()
        self.loader = ImageLoader(FrontendConfig(**config), self.metrics, resolve=self._resolve)
        self.intake = self.loader.intake()
        self._pool = pool

    async def _resolve(self, host: str, port: int) -> list[str]:
        return ["10.0.0.1"]

    async def load(self, *parts: str | bytes, model: ModelCard | None = None) -> list[LoadedImage]:
        found = find_images(messages(user(*parts)))
        return await self.intake.load(found, model or card(), self._pool)

    async def refused(self, *parts: str | bytes, **options: Any) -> InvalidRequest:
        with pytest.raises(InvalidRequest) as caught:
            await self.load(*parts, **options)
        return caught.value

    def counted(self, reason: str) -> float:
        return self.metrics.images_refused.labels(reason).value


@pytest.fixture
async def loading(pool: TextPool) -> AsyncIterator[Loading]:
    made = Loading(pool, max_image_bytes=5000, max_image_pixels=10_000)
    yield made
    made.intake.release()
    made.intake.release()
    assert made.loader.held == 0
    await made.loader.close()


# ------------------------------------------------------------------ in messages


def test_images_are_found_in_their_order() -> None:
    chat = messages(
        {"role": "system", "content": "look"},
        user("a", "url:https://a.example/1", "b", "url:data:x"),
        {"role": "assistant", "content": None},
        {"role": "tool", "content": [{"type": "image_url", "image_url": "short"}]},
    )
    assert count_parts(chat) == 5
    assert find_images(chat) == [
        ("messages[1].content[1].image_url", "https://a.example/1"),
        ("messages[1].content[3].image_url", "data:x"),
        ("messages[3].content[0].image_url", "short"),
    ]
    bare = without_files(chat, ContentPart(type="image", text="<image>"))
    assert find_images(chat[:1]) == []
    assert bare[0] is chat[0]
    assert [part.type for part in bare[1].content or () if isinstance(part, ContentPart)] == [
        *("text", "image", "text", "image")
    ]


@pytest.mark.parametrize("given", [None, "", {}, {"url": None}, {"url": ""}, {"detail": "low"}])
def test_an_image_has_a_url(given: Any) -> None:
    chat = messages({"role": "user", "content": [{"type": "image_url", "image_url": given}]})
    with pytest.raises(InvalidRequest, match=r"'messages\[0\].content\[0\].image_url' is required"):
        find_images(chat)


def test_the_form_for_templates_is_not_the_clients() -> None:
    """It would shift images to other places."""
    chat = messages({"role": "user", "content": [{"type": "image", "text": "<image>"}]})
    with pytest.raises(InvalidRequest, match="use 'image_url'") as caught:
        find_images(chat)
    assert caught.value.param == "messages[0].content[0].type"


# ------------------------------------------------------------------ loading


async def test_files_are_checked_and_named(loading: Loading) -> None:
    files = [png(100, 50), jpeg(30, 20), png(100, 50)]
    images = await loading.load("see", *files)
    assert images == [
        LoadedImage(files[0], image_digest(files[0]), 100, 50),
        LoadedImage(files[1], image_digest(files[1]), 30, 20),
        LoadedImage(files[0], image_digest(files[0]), 100, 50),
    ]
    assert loading.metrics.request_images.labels("data").value == 3
    assert sum(map(len, files)) <= loading.loader.held < sum(map(len, files)) + 100


async def test_large_files_are_worked_on_in_threads(pool: TextPool) -> None:
    loading = Loading(pool)
    inline = pool.inline
    (image,) = await loading.load(png(shows=bytes(3_000_000)))
    assert len(image.data) > 3_000_000
    assert pool.inline == inline
    loading.intake.release()
    await loading.loader.close()


@pytest.mark.parametrize(
    ("part", "reason", "words"),
    [
        (png(101, 100), "pixels", "has 101 by 100 pixels; 10000 are allowed"),
        (png(1 << 31, 1 << 31), "pixels", "--max-image-pixels"),
        (png(shows=bytes(6000)), "size", "--max-image-bytes"),
        (b"<svg/>", "type", "is no picture"),
        (b"\x89PNG\r\n\x1a\n", "type", "ends before its size"),
        ("url:data:text/plain;base64,YWJj", "type", "'text/plain'"),
        ("url:data:image/png;base64,***", "url", "no valid base64"),
        ("url:https://a.example/1.png", "url", "--allowed-media-domains"),
        ("url:file:///etc/passwd", "url", "'data:' URL"),
        ("url:http://127.0.0.1/", "url", "127.0.0.1"),
    ],
)
async def test_what_is_refused(
    loading: Loading, part: str | bytes, reason: str, words: str
) -> None:
    error = await loading.refused("see", png(), "and", part)
    assert error.param == "messages[0].content[3].image_url"
    assert error.message.startswith("'messages[0].content[3].image_url' ")
    assert words in error.message
    assert loading.counted(reason) == 1


async def test_urls_of_allowed_hosts_are_fetched_and_their_addresses_checked(
    pool: TextPool,
) -> None:
    loading = Loading(pool, allowed_media_domains=("a.example",))
    error = await loading.refused("url:https://a.example/1.png")
    assert "not public" in error.message
    assert loading.counted("address") == 1
    await loading.loader.close()


async def test_the_number_of_images_is_limited(pool: TextPool) -> None:
    loading = Loading(pool, max_images=3)
    error = await loading.refused(*[png()] * 4)
    assert "one of 4 images; --max-images allows 3" in error.message
    assert error.param == "messages[0].content[3].image_url"
    few = model(image=ImagePlaceholder(token=5, text="x", most=1))
    assert "the model takes 1" in (await loading.refused(png(), png(), model=few)).message
    assert loading.counted("count") == 2
    assert loading.loader.held == 0
    await loading.loader.close()


async def test_memory_of_one_request_and_of_all(pool: TextPool) -> None:
    loading = Loading(pool, max_image_memory=20_000, max_image_bytes=1 << 20)
    await loading.load(png(shows=bytes(12_000)))
    other = loading.loader.intake()
    with pytest.raises(Overloaded, match="--max-image-memory"):
        await other.load(find_images(messages(user(png(shows=bytes(12_000))))), card(), pool)
    assert loading.counted("memory") == 1
    loading.intake.release()
    await other.load(find_images(messages(user(png(shows=bytes(12_000))))), card(), pool)
    other.release()
    assert loading.loader.held == 0
    await loading.loader.close()


async def test_an_image_that_has_no_turn_is_counted(pool: TextPool) -> None:
    loading = Loading(pool, allowed_media_domains=("*",), image_fetch_timeout=0.02)
    refusal = loading.loader.fetcher._crowded
    loading.loader.fetcher.places = FairSemaphore(0, 1, refusal, time.monotonic)
    with pytest.raises(FetchesFull, match=r"no turn to be fetched within 0\.02 s"):
        await loading.load("url:https://a.example/1")
    assert loading.counted("busy") == 1
    assert loading.loader.held == 0
    await loading.loader.close()


async def test_requests_share_fetches_by_their_keys_tenants(pool: TextPool) -> None:
    """Two requests of one tenant are fetched for it alone; without keys each is for itself."""
    loading = Loading(pool, allowed_media_domains=("*",))
    for key, expected in (
        (KEY, {"acme": 4}),
        (None, {"\0" + "1".zfill(16): 2, "\0" + "2".zfill(16): 2}),
    ):
        fetched: list[str] = []

        async def fetch(url: str, reserve: object, tenant: str, told: list[str] = fetched) -> bytes:
            told.append(tenant)
            return png()

        loading.loader.fetcher.fetch = fetch  # type: ignore[method-assign,assignment]
        loading.loader._numbers = itertools.count(1)
        for _ in range(2):
            intake = loading.loader.intake(key)
            await intake.load([("a", "http://a.example"), ("b", "http://b.example")], card(), pool)
            intake.release()
        assert Counter(fetched) == expected
    await loading.loader.close()


async def test_a_request_travels_as_one_message(pool: TextPool) -> None:
    loading = Loading(pool, max_image_bytes=30 << 20)
    part = f"url:{data_url(png())[:-4]}{base64.b64encode(bytes(25 << 20)).decode()}"
    error = await loading.refused(part, part)
    assert "the images of a request may have 50331648 bytes together" in error.message
    assert loading.counted("size") == 1
    loading.intake.release()
    await loading.loader.close()
