"""Images are fetched from public addresses only, within bounds; every hostile URL is refused.

A real server answers on two loopback addresses. For the tests one of them counts as public, the
other one and everything else is judged as it really is.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import random
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from pdserve.errors import Overloaded
from pdserve.frontend.images.addresses import is_public
from pdserve.frontend.images.fetcher import FetchesFull, ImageFetcher
from pdserve.frontend.images.sources import ImageRefused, MediaDomains
from tests.frontend.images.pictures import jpeg, png
from tests.frontend.support import until

PUBLIC, PRIVATE = "127.0.0.77", "127.0.0.2"
SILENT = "127.0.0.78"
"""Public as well, and nobody listens there."""
MOST = 100_000
FILE = png(shows=b"x" * 5000)


class Hosts:
    """A web server, its names, and who asked it for what."""

    def __init__(self) -> None:
        self.port = 0
        self.asked: list[tuple[str, str]] = []
        """(address that was asked, path)."""
        self.headers: list[dict[str, str]] = []
        self.names: dict[str, list[str]] = {"pictures.example": [PUBLIC]}
        self.lookups: list[str] = []
        self.let_go = asyncio.Event()

    def url(self, path: str, host: str = "pictures.example", port: int | None = None) -> str:
        return f"http://{host}:{self.port if port is None else port}{path}"

    async def resolve(self, host: str, port: int) -> list[str]:
        self.lookups.append(host)
        if host in self.names:
            return self.names[host]
        # What a system's resolver makes of numbers in any notation.
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [str(each[4][0]) for each in found]

    async def handle(self, request: Any) -> web.StreamResponse:
        name = request.transport.get_extra_info("sockname")[0] if request.transport else ""
        self.asked.append((name, request.path_qs))
        self.headers.append(dict(request.headers))
        return await getattr(self, "get_" + request.path.split("/")[1])(request)

    async def get_picture(self, request: web.Request) -> web.Response:
        return web.Response(body=FILE, content_type="text/plain")

    async def get_jpeg(self, request: web.Request) -> web.Response:
        return web.Response(body=jpeg(before=b"\xff\xfe\x40\x00" + bytes(0x3FFE)))

    async def get_page(self, request: web.Request) -> web.Response:
        return web.Response(text="<html>" + "secret " * 5000, content_type="image/png")

    async def get_zipped(self, request: web.Request) -> web.Response:
        body = gzip.compress(FILE + bytes(50_000_000))
        return web.Response(body=body, headers={"Content-Encoding": "gzip"})

    async def get_large(self, request: web.Request) -> web.Response:
        return web.Response(body=FILE + bytes(MOST))

    async def get_endless(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(FILE)
        while True:
            await answer.write(bytes(10_000))

    async def get_slow(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(FILE[:20])
        await self.let_go.wait()
        return answer

    async def get_cut(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Length": str(len(FILE))})
        await answer.prepare(request)
        await answer.write(FILE[:200])
        assert request.transport is not None
        request.transport.abort()
        return answer

    async def get_status(self, request: web.Request) -> web.Response:
        return web.Response(status=int(request.path.split("/")[2]))

    async def get_to(self, request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": request.query["url"]})

    async def get_round(self, request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": f"/round/{len(self.asked)}"})

    async def get_cookie(self, request: web.Request) -> web.Response:
        answer = web.Response(body=FILE)
        answer.set_cookie("session", "1")
        return answer


@pytest.fixture
async def hosts() -> AsyncIterator[Hosts]:
    hosts = Hosts()
    runner = web.ServerRunner(web.Server(hosts.handle), shutdown_timeout=0.1)
    await runner.setup()
    first = web.TCPSite(runner, PUBLIC, 0)
    await first.start()
    hosts.port = runner.addresses[0][1]
    await web.TCPSite(runner, PRIVATE, hosts.port).start()
    yield hosts
    hosts.let_go.set()
    await runner.cleanup()


Fetch = Callable[[str], Awaitable[bytes]]


@pytest.fixture
async def fetcher(hosts: Hosts) -> AsyncIterator[ImageFetcher]:
    made = make(hosts)
    yield made
    await made.close()
    await made.close()


def make(hosts: Hosts, timeout: float = 20.0, **changes: Any) -> ImageFetcher:
    settings: dict[str, Any] = {
        "resolve": hosts.resolve,
        "public": lambda address: address in (PUBLIC, SILENT) or is_public(address),
    }
    return ImageFetcher(MediaDomains.of(["*"]), MOST, timeout, **(settings | changes))


async def refused(fetcher: ImageFetcher, url: str) -> ImageRefused:
    with pytest.raises(ImageRefused) as caught:
        await fetcher.fetch(url, lambda size: None)
    return caught.value


# ------------------------------------------------------------------ what is fetched


async def test_a_file_arrives_and_is_accounted_as_it_comes(
    hosts: Hosts, fetcher: ImageFetcher
) -> None:
    held: list[int] = []
    assert await fetcher.fetch(hosts.url("/picture/1?a=b"), held.append) == FILE
    assert sum(held) == len(FILE)
    assert hosts.asked == [(PUBLIC, "/picture/1?a=b")]
    assert await fetcher.fetch(hosts.url("/jpeg"), held.append)


async def test_nothing_of_the_server_or_of_other_fetches_is_sent(
    hosts: Hosts, fetcher: ImageFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.2:1")
    for _ in range(2):
        await fetcher.fetch(hosts.url("/cookie"), lambda size: None)
    for headers in hosts.headers:
        assert {name.lower() for name in headers} <= {
            *("host", "accept", "accept-encoding", "user-agent"),
            *("connection",),
        }
        assert headers["Host"] == f"pictures.example:{hosts.port}"


async def test_redirects_are_followed_to_public_addresses(
    hosts: Hosts, fetcher: ImageFetcher
) -> None:
    hosts.names["other.example"] = [PUBLIC]
    url = hosts.url(f"/to?url={hosts.url('/picture', 'other.example')}")
    assert await fetcher.fetch(url, lambda size: None) == FILE
    assert await fetcher.fetch(hosts.url("/to?url=/picture/2"), lambda size: None) == FILE


async def test_a_name_with_several_addresses(hosts: Hosts, fetcher: ImageFetcher) -> None:
    """The first one does not answer, and the next one is taken."""
    hosts.names["pictures.example"] = [SILENT, PUBLIC]
    assert await fetcher.fetch(hosts.url("/picture"), lambda size: None) == FILE


# ------------------------------------------------------------------ addresses


LITERALS = [
    *("127.0.0.2", "127.0.0.2.", "0177.0.0.2", "0x7f.0.0.2", "0x7f000002", "2130706434"),
    *("127.2", "127.0.2", "017700000002", "[::ffff:127.0.0.2]", "[::ffff:7f00:2]", "[::1]"),
    *("[64:ff9b::7f00:2]", "[2002:7f00:2::]", "[fe80::1]", "[fe80::1%25lo]", "[::]", "0"),
    *("0.0.0.0", "localhost", "LOCALHOST.", "127.0.0.2:80@127.0.0.2", "169.254.169.254"),
    *("10.0.0.1", "192.168.0.1", "172.16.0.1", "100.64.0.1", "[fd00::1]", "224.0.0.1"),
    *("pictures.example@127.0.0.2", "127.0.0.2#@pictures.example", "127.0.0.2\\@pictures.example"),
    *("127。0。0。2", "①②⑦.⓪.⓪.②", "%31%32%37.0.0.2"),
]


@pytest.mark.parametrize("host", LITERALS)
async def test_addresses_that_are_not_public(
    hosts: Hosts, fetcher: ImageFetcher, host: str
) -> None:
    for url in (f"http://{host}:{hosts.port}/picture", f"http://{host}/picture"):
        assert (await refused(fetcher, url)).reason in ("address", "url", "fetch")
    target = f"http://{host}:{hosts.port}/picture".replace("#", "%23")
    error = await refused(fetcher, hosts.url("/to?url=") + target)
    assert error.reason in ("address", "url", "fetch")
    assert {address for address, path in hosts.asked if path.startswith("/picture")} == set()


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.2"],
        ["10.1.2.3"],
        ["169.254.169.254"],
        ["::1"],
        ["::ffff:127.0.0.2"],
        ["fe80::1%1"],
        [PUBLIC, "127.0.0.2"],
        ["not an address"],
    ],
)
async def test_names_that_mean_private_addresses(
    hosts: Hosts, fetcher: ImageFetcher, addresses: list[str]
) -> None:
    hosts.names["inside.example"] = addresses
    error = await refused(fetcher, hosts.url("/picture", "inside.example"))
    assert error.reason == "address"
    assert "not public" in error.message
    error = await refused(fetcher, hosts.url(f"/to?url={hosts.url('/picture', 'inside.example')}"))
    assert error.reason == "address"
    assert [path for _, path in hosts.asked if path == "/picture"] == []


async def test_a_name_is_looked_up_once_and_connected_as_it_was_checked(hosts: Hosts) -> None:
    """The second answer of this name would be a private address (DNS rebinding)."""
    answers = [[PUBLIC], [PRIVATE], [PRIVATE]]

    async def rebinding(host: str, port: int) -> list[str]:
        return answers.pop(0)

    fetcher = make(hosts, resolve=rebinding)
    assert await fetcher.fetch(hosts.url("/picture"), lambda size: None) == FILE
    assert [address for address, _ in hosts.asked] == [PUBLIC]
    assert len(answers) == 2
    assert (await refused(fetcher, hosts.url("/picture"))).reason == "address"
    await fetcher.close()


async def test_the_systems_resolver(hosts: Hosts) -> None:
    fetcher = make(hosts, resolve=None, public=is_public)
    assert (await refused(fetcher, "http://localhost/picture")).reason == "address"
    error = await refused(fetcher, "http://no-such-name.invalid/picture")
    assert error.reason in ("fetch", "slow")
    await fetcher.close()


# ------------------------------------------------------------------ bounds


@pytest.mark.parametrize(
    ("path", "reason", "words"),
    [
        ("/large", "size", "more than 100000 bytes"),
        ("/endless", "size", "--max-image-bytes"),
        ("/page", "type", "is no picture"),
        ("/zipped", "type", "is no picture"),
        ("/cut", "fetch", "cannot be fetched"),
        ("/status/404", "fetch", "answers 404"),
        ("/status/500", "fetch", "answers 500"),
        ("/status/304", "fetch", "answers 304"),
        ("/status/301", "fetch", "invalid URL|is redirected"),
        ("/round", "fetch", "more than 3 times"),
        ("/to?url=file:///etc/passwd", "url", "redirected, and the target has the scheme 'file'"),
        ("/to?url=data:image/png;base64,AAAA", "url", "scheme 'data'"),
        ("/to?url=http://[", "fetch", "invalid URL"),
    ],
)
async def test_what_a_hostile_server_may_send(
    hosts: Hosts, fetcher: ImageFetcher, path: str, reason: str, words: str
) -> None:
    with pytest.raises(ImageRefused, match=words) as caught:
        await fetcher.fetch(hosts.url(path), lambda size: None)
    assert caught.value.reason == reason
    assert len(hosts.asked) <= 4


async def test_a_slow_server(hosts: Hosts) -> None:
    fetcher = make(hosts, timeout=0.2)
    error = await refused(fetcher, hosts.url("/slow"))
    assert error.reason == "slow"
    assert "--image-fetch-timeout" in error.message
    await fetcher.close()


class Slow:
    """Fetches of tenants whose host does not answer."""

    def __init__(self, fetcher: ImageFetcher, url: str) -> None:
        self._fetcher = fetcher
        self._url = url
        self.tasks: list[asyncio.Task[bytes]] = []

    async def begin(self, tenant: str, number: int) -> None:
        """Until they run or wait."""
        places = self._fetcher.places
        entered = places.running + places.waiting + number
        for _ in range(number):
            fetch = self._fetcher.fetch(self._url, lambda size: None, tenant)
            self.tasks.append(asyncio.create_task(fetch))
        await until(lambda: places.running + places.waiting == entered)

    async def end(self) -> list[Any]:
        for task in self.tasks:
            task.cancel()
        return await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_one_tenants_slow_images_leave_places_to_others(hosts: Hosts) -> None:
    fetcher = make(hosts)
    slow = Slow(fetcher, hosts.url("/slow"))
    await slow.begin("slow", 100)
    assert (fetcher.places.running, fetcher.places.waiting) == (32, 68)
    for tenant in ("a", "b"):
        assert await fetcher.fetch(hosts.url("/picture"), lambda size: None, tenant) == FILE
    await slow.end()
    assert (fetcher.places.running, fetcher.places.waiting) == (0, 0)
    await fetcher.close()


async def test_an_image_without_a_turn_is_not_the_clients_fault(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.frontend.images.fetcher._FETCHES", 2)
    fetcher = make(hosts)
    slow = Slow(fetcher, hosts.url("/slow"))
    await slow.begin("a", 1)
    await slow.begin("b", 1)
    await until(lambda: len(hosts.asked) == 2)
    fetcher._timeout = 0.05
    with pytest.raises(FetchesFull, match="2 are being fetched, 0 of them for this cl") as caught:
        await fetcher.fetch(hosts.url("/picture"), lambda size: None, "c")
    assert (caught.value.http_status, caught.value.retry_after) == (429, 0.05)
    assert len(hosts.asked) == 2
    await slow.end()
    await fetcher.close()


async def test_a_fetch_has_its_time_from_its_turn_on(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it waited before does not count: its time is what is set when its turn comes."""
    monkeypatch.setattr("pdserve.frontend.images.fetcher._FETCHES", 1)
    fetcher = make(hosts, timeout=600.0)
    slow = Slow(fetcher, hosts.url("/slow"))
    await slow.begin("a", 1)
    waiting = asyncio.create_task(fetcher.fetch(hosts.url("/slow"), lambda size: None, "b"))
    await until(lambda: fetcher.places.waiting)
    fetcher._timeout = 0.05
    await slow.end()
    with pytest.raises(ImageRefused, match=r"within 0\.05 s"):
        await waiting
    await fetcher.close()


async def test_too_many_images_that_wait(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tenant with the most of them is told so, and no other one."""
    monkeypatch.setattr("pdserve.frontend.images.fetcher._FETCHES", 1)
    monkeypatch.setattr("pdserve.frontend.images.fetcher._WAITING", 4)
    fetcher = make(hosts)
    slow = Slow(fetcher, hosts.url("/slow"))
    await slow.begin("flood", 5)
    with pytest.raises(FetchesFull, match="this client's are the most") as caught:
        await fetcher.fetch(hosts.url("/picture"), lambda size: None, "flood")
    assert caught.value.http_status == 429
    other = asyncio.create_task(fetcher.fetch(hosts.url("/picture"), lambda size: None, "other"))
    await until(lambda: any(task.done() for task in slow.tasks))
    refused = [each for each in await slow.end() if isinstance(each, FetchesFull)]
    assert len(refused) == 1
    assert await other == FILE
    await fetcher.close()


async def test_one_tenants_slow_names_leave_threads_to_others(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()

    def look_up(host: str, port: int, **_: object) -> list[Any]:
        if host == "slow.example":
            answered.wait(30.0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (PUBLIC, port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    fetcher = make(hosts, resolve=None)
    slow = Slow(fetcher, hosts.url("/slow", "slow.example"))
    await slow.begin("slow", 20)
    try:
        assert await fetcher.fetch(hosts.url("/picture"), lambda size: None, "other") == FILE
    finally:
        answered.set()
        await slow.end()
        await fetcher.close()


async def test_a_slow_name(hosts: Hosts) -> None:
    async def never(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    fetcher = make(hosts, timeout=0.1, resolve=never)
    assert (await refused(fetcher, hosts.url("/picture"))).reason == "slow"
    await fetcher.close()


async def test_nobody_listens(hosts: Hosts, fetcher: ImageFetcher) -> None:
    with socket.socket() as unused:
        unused.bind((PUBLIC, 0))
        url = hosts.url("/picture", port=unused.getsockname()[1])
        assert (await refused(fetcher, url)).reason == "fetch"


async def test_memory_ends_a_fetch(hosts: Hosts, fetcher: ImageFetcher) -> None:
    def none_left(size: int) -> None:
        raise Overloaded("no memory", retry_after=1.0)

    with pytest.raises(Overloaded):
        await fetcher.fetch(hosts.url("/endless"), none_left)


async def test_a_client_that_leaves_ends_the_fetch(hosts: Hosts, fetcher: ImageFetcher) -> None:
    task = asyncio.create_task(fetcher.fetch(hosts.url("/slow"), lambda size: None))
    await until(lambda: hosts.asked)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_hosts_that_are_not_allowed_are_not_even_looked_up(hosts: Hosts) -> None:
    fetcher = ImageFetcher(
        MediaDomains.of(["pictures.example"]),
        MOST,
        5.0,
        resolve=hosts.resolve,
        public=lambda address: address == PUBLIC,
    )
    hosts.names["other.example"] = [PUBLIC]
    assert (await refused(fetcher, hosts.url("/picture", "other.example"))).reason == "url"
    url = hosts.url(f"/to?url={hosts.url('/picture', 'other.example')}")
    assert (await refused(fetcher, url)).reason == "url"
    assert hosts.lookups == ["pictures.example"]
    await fetcher.close()


async def test_any_answer_is_a_file_or_a_refusal(hosts: Hosts, seed: int, long: bool) -> None:
    """Bytes of answers are changed, cut and repeated."""
    rng = random.Random(seed)
    head = b"HTTP/1.1 %s\r\nContent-Length: %d\r\nContent-Type: image/png\r\n\r\n"
    whole = [
        head % (b"200 OK", len(FILE)) + FILE,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n"
        + FILE[:64]
        + b"\r\n0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: /again\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n" + FILE,
    ]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(_changed(rng, rng.choice(whole)))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, PUBLIC, 0)
    port = server.sockets[0].getsockname()[1]
    fetcher = make(hosts)
    fetched = 0
    for _ in range(2000 if long else 150):
        try:
            file = await fetcher.fetch(hosts.url("/any", port=port), lambda size: None)
        except ImageRefused:
            continue
        assert len(file) <= MOST
        fetched += 1
    assert fetched > 10
    await fetcher.close()
    server.close()
    await server.wait_closed()


def _changed(rng: random.Random, answer: bytes) -> bytes:
    data = bytearray(answer)
    for _ in range(rng.choice([0, 0, 1, 2, 5])):
        at = rng.randrange(min(len(data), 200))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randrange(1, 20)]
            case 2:
                data[at:at] = data[:at][-rng.randrange(1, 40) :]
            case _:
                del data[rng.randrange(len(data)) :]
        if not data:
            break
    return bytes(data)
