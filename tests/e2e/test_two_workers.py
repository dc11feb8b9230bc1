"""README's chat on two workers, command by command: the second turn finds its cache."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.openai_client import client_of
from tests.e2e.readme import Places, blocks, flags, header, run, section, wait_sound
from tests.e2e.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

SECTION = section("A chat finds its cache")
SHELLS, CHAT, COUNTERS = blocks(SECTION)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    """README's four shells, ready."""
    home = {"XDG_CONFIG_HOME": str(tmp_path_factory.mktemp("home"))}
    found = Places()
    router, left, right, frontend = SHELLS.splitlines()
    listen = ("--listen", "127.0.0.1:0")  # the default port may be somebody's
    with Server(None, *flags(router, found), *listen, **home) as routing:
        seed = routing.wait_for_line(r"router \S+ at (\S+)")[1]
        found.ports["7700"] = int(seed.rpartition(":")[2])
        found.ports["8000"] = 0
        with (
            Server(None, *flags(left, found), **home) as one,
            Server(None, *flags(right, found), **home) as other,
            Server(None, *flags(frontend, found), **home) as front,
        ):
            for worker in (one, other):
                worker.wait_for_line("ready: ")
            front.wait_for_line("ready: ")
            wait_sound(front, 2)
            found.ports["8000"] = front.port
            yield found


@pytest.mark.timeout(180)
def test_the_second_turn_of_readmes_chat_hits_the_cache(places):
    first, second = re.split(r"(?=HTTP/1\.1 200)", run(CHAT, places))[1:]
    assert header(first, "cached-tokens") == "0"
    assert header(second, "worker") == header(first, "worker")
    (promised,) = re.findall(r"x-pdserve-cached-tokens: (\d+)", SECTION)
    assert header(second, "cached-tokens") == promised
    assert int(promised) >= 64
    assert header(second, "overlap-tokens") == promised, "the router knew"
    told = json.loads(second.partition("\n{")[2].join(("{", "")))["usage"]["pdserve"]
    assert (told["worker"], told["cached_tokens"]) == (header(second, "worker"), int(promised))
    counted = [float(line.split()[1]) for line in run(COUNTERS, places).splitlines()]
    assert sorted(counted) == [0.0, float(promised)]


@pytest.mark.timeout(180)
def test_a_route_is_explained_and_a_worker_can_be_named(places):
    url = places.fill("http://127.0.0.1:8000")
    with client_of(url) as client:
        for name in ("left", "right"):
            answer = client.chat.completions.with_raw_response.create(
                model="bundled",
                messages=[{"role": "user", "content": "Who are you?"}],
                max_tokens=4,
                extra_headers={"x-pdserve-worker": name},
            )
            assert answer.headers["x-pdserve-worker"] == name
        with client.chat.completions.create(
            model="bundled",
            messages=[{"role": "user", "content": "Who are you?"}],
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"x-pdserve-worker": "!left"},
        ) as stream:
            usage: Any = [chunk.usage for chunk in stream][-1]
        assert usage.pdserve["worker"] == "right"
        explained: Any = client.post(
            f"{url}/route",
            body={"messages": [{"role": "user", "content": "Who are you?"}]},
            cast_to=object,
        )
    candidates = {one["worker"]: one for one in explained["candidates"]}
    assert set(candidates) == {"left", "right"}
    assert candidates[explained["worker"]]["chosen"] is True
