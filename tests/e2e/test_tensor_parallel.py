"""Ranks of one model as real processes: prompts that move between unequal sizes, and a rank killed.

A worker without ranks is the oracle. Counters show that KV came from the other worker, and how many
bytes of it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from pdserve.protocols.sse import SseDecoder
from tests.chaos.cluster import Cluster, eventually
from tests.e2e.test_disaggregation import (
    BACKENDS,
    BLOCK,
    CHUNK,
    Moved,
    Roles,
    ask,
    blocks_of,
    opened,
    reached,
    tokens,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.chaos.cluster import Node

pytestmark = [
    pytest.mark.long(whole_file=True, one_in=4),  # it starts eight processes that compute
    pytest.mark.timeout(180),
]
SIZES = {"shm": 1, "tcp": 4}
"""Ranks of the decode worker that each back end reaches; the prefill worker has two. The bundled
model has two KV heads: of four ranks two hold each."""


COPIES = {"shm": 1, "tcp": 2}
"""Ranks of the decode worker that get the same bytes."""


class RankRoles(Roles):
    """Counts what all ranks receive."""

    def tell(self, worker: str, prefill: str, usage: Mapping[str, Any], choices: int) -> None:
        before = self.told[worker]["blocks"]
        super().tell(worker, prefill, usage, choices)
        more = self.told[worker]["blocks"] - before
        self.told[worker]["blocks"] += more * (COPIES.get(worker, 1) - 1)


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        router = cluster.router()
        engine: tuple[str, ...] = ("--dtype", "float32", "--threads", "1", "--kv-memory", "64MiB")
        engine += ("--block-size", str(BLOCK), "--max-batch-tokens", str(CHUNK))
        engine += ("--max-sequences", "16")

        def worker(name: str, *flags: str) -> Node:
            flags = ("--verify-kv", "all", *engine, *flags)
            return cluster.start("worker", name, "--join", cluster.address, *flags)

        prefill = worker("prefill", "--mode", "prefill", "--tp", "2")
        decode = {
            backend: worker(
                *(backend, "--mode", "decode", "--disagg", "always", "--transfer", backend),
                *("--tp", str(SIZES[backend])),
            )
            for backend in BACKENDS
        }
        worker("alone")
        frontend = cluster.frontend()
        cluster.wait_ready()
        found = RankRoles(cluster, router, prefill, frontend, decode)
        for name in (*BACKENDS, "alone"):
            eventually(partial(reached, found, name), f"{name} is not reached")
        yield found


@pytest.mark.parametrize("backend", BACKENDS)
def test_prompts_move_between_unequal_sizes(roles: Roles, backend: str) -> None:
    lengths = (1, BLOCK, BLOCK + 1, CHUNK + 9, 3 * CHUNK)
    moved = Moved(roles, backend)
    for length in lengths:
        prompt = tokens(length, f"{backend} of {length}")
        answer = ask(roles, backend, prompt=prompt)
        assert answer.prefill == "remote; node=prefill; reason=always"
        expected = ask(roles, "alone", prompt=prompt)
        assert answer.body["choices"] == expected.body["choices"], length
    blocks = COPIES[backend] * sum(map(blocks_of, lengths))
    moved.is_(blocks=blocks, computed=7 * len(lengths), there=sum(lengths))


def test_a_killed_rank_costs_no_token(roles: Roles) -> None:
    """The last rank of the decode worker dies in the middle of a stream."""
    fields: dict[str, Any] = {"prompt": tokens(40, "a rank dies"), "max_tokens": 400}
    expected = ask(roles, "alone", **fields).body["choices"][0]["text"]
    decode = roles.decode["tcp"]
    decode.expected_errors = True
    before = ranks_of(decode)
    assert len(before) == SIZES["tcp"] - 1
    with opened(roles, "tcp", "/v1/completions", fields | {"stream": True}) as answer:
        stream = SseDecoder()
        text = text_of(stream, answer.read1())
        assert text, "nothing has been streamed"
        before[-1].kill()
        text += text_of(stream, answer.read())
    assert text == expected
    eventually(lambda: not any(one.is_running() for one in before), "old ranks are left")
    eventually(lambda: len(ranks_of(decode)) == len(before), "no new ranks", 60)


def text_of(stream: SseDecoder, body: bytes) -> str:
    """That the next bytes of a stream bring."""
    events = [event.data for event in stream.feed(body) if event.data != "[DONE]"]
    chunks = [json.loads(data) for data in events]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def ranks_of(node: Node) -> list[psutil.Process]:
    """The node's processes that compute as a rank beside the first, in order of age."""
    found = [one for one in node.processes() if _is_rank(one)]
    return sorted(found, key=lambda one: one.pid)


def _is_rank(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any("tensor_parallel" in word for word in process.cmdline())
    return False
