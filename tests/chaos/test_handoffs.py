"""Faults while prompts are computed on one worker for another: nobody is served a wrong token.

Prefill workers are slow, so that KV moves for seconds; that a fault fell into a transfer is shown by
what both workers count. Every text is compared with that of a worker that does everything by
itself: tokens follow from the bytes of all blocks.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.chaos.cluster import Cluster, Node, eventually
from tests.chaos.load import Stream, wait_served

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(300)

SOON = 1.0
"""Seconds after which both workers are free of a request that nobody wants."""
STEP = 32
"""Prompt tokens that a prefill worker computes, and sends, at a time: a block."""
SIM = ("--engine", "sim", "--engine-option", "content=on", "--engine-option", "blocks=1024")
SLOW = ("--engine-option", "slowdown=15", "--max-batch-tokens", str(STEP), "--max-sequences", "4")
"""A tenth of a second for each block."""
TRIES = 5


class Roles:
    """A cluster with prefill workers p1…, decode workers d1… and one that does it all."""

    def __init__(self, cluster: Cluster, transfer: str = "auto") -> None:
        self.cluster = cluster
        self.transfer = transfer
        self.routers = [cluster.router()]
        self.alone = self.worker("alone", "--engine-option", "slowdown=0")
        self.frontend = cluster.frontend()
        self._prompts = 0

    def worker(self, name: str, *flags: str) -> Node:
        flags = (*SIM, "--verify-kv", "all", "--transfer", self.transfer, *flags)
        return self.cluster.start("worker", name, "--join", self.cluster.address, *flags)

    def prefill(self, name: str) -> Node:
        return self.worker(name, "--mode", "prefill", *SLOW)

    def decode(self, name: str) -> Node:
        return self.worker(name, "--mode", "decode", "--disagg", "always")

    def wait_ready(self, *decode: Node) -> None:
        """Until prompts of these are computed elsewhere."""
        self.cluster.wait_ready()
        for node in decode:
            eventually(lambda node=node: self._remote(node), lambda n=node: n.lines)

    def _remote(self, node: Node) -> bool:
        return "remote" in self.answer(node, self.prompt(1)).headers["x-pdserve-prefill"]

    def prompt(self, steps: int) -> str:
        """One that nobody has asked before, of at least so many steps."""
        self._prompts += 1
        return f"{self._prompts} " + "~" * (STEP * steps)

    def answer(self, node: Node, text: str) -> Any:
        return wait_served(self.frontend, worker=node.name, **_asked(text))

    def stream(self, node: Node, text: str) -> Stream:
        fields = _asked(text) | {"stream_options": {"include_usage": True}}
        return Stream(self.frontend, tokens=TOKENS, worker=node.name, **fields)

    def check(self, text: str, stream: Stream) -> str:
        """It ended well, with the tokens that it had to have. Returns where it was prefilled."""
        assert stream.wait().done, stream
        body = self.answer(self.alone, text).body
        assert stream.text == body["choices"][0]["message"]["content"]
        return str(stream.usage["pdserve"]["prefill"])


TOKENS = 12
FAILED = "(?:lost|failed|lapsed|died)"
"""Of attempts: the path's end and the cluster's word of it come in either order."""


def _asked(text: str) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {"messages": [message], "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


# ---------------------------------------------------------------------- looking


def total(node: Node, pattern: str) -> float:
    """Sum of the samples that match."""
    _, page = node.get("/metrics", node.probes)
    return sum(map(float, re.findall(rf"^pdserve_{pattern} (\S+)$", page, re.MULTILINE)))


def state(node: Node, name: str) -> float:
    """How many handoffs are in it."""
    return total(node, rf'handoffs{{state="{name}"}}')


def attempts(node: Node, outcome: str = "[a-z]+") -> float:
    return total(node, rf'handoff_attempts_total{{outcome="{outcome}"}}')


def sent(node: Node) -> float:
    """Bytes."""
    return total(node, r'transfer_bytes_total{.*direction="sent".*}')


def sending(workers: list[Node], before: dict[str, float]) -> Node:
    """The prefill worker that computes and has sent something, waited for."""

    def found() -> Node | None:
        for node in workers:
            if state(node, "computing") and sent(node) > before[node.name]:
                return node
        return None

    node: Node = eventually(found, lambda: [node.lines for node in workers])
    return node


def busy(node: Node) -> dict[str, float]:
    """Whatever a worker holds for requests."""
    names = ("kv_blocks_used", "kv_blocks_quarantined", "num_requests_running")
    found = {name: total(node, name) for name in names}
    found["handoffs"] = total(node, r"handoffs{.*}")
    return {name: value for name, value in found.items() if value}


def free(*nodes: Node, within: float = 30.0) -> None:
    """Nothing is held for requests, by then."""
    eventually(
        lambda: not any(map(busy, nodes)), lambda: {node.name: busy(node) for node in nodes}, within
    )


def descriptors(node: Node) -> int:
    """Of the worker and its engine."""
    me = psutil.Process(node.process.pid)
    return sum(process.num_fds() for process in (me, *me.children(recursive=True)))


# ---------------------------------------------------------------------- prefill workers


@pytest.fixture(params=["auto", pytest.param("tcp", marks=pytest.mark.long)])
def roles(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Roles]:
    return Roles(cluster, request.param)


def test_a_killed_prefill_worker_is_a_later_first_token(roles):
    prefills, decode = [roles.prefill("p1"), roles.prefill("p2")], roles.decode("d1")
    roles.wait_ready(decode)

    died = kill_while_sending(roles, decode, prefills, "remote; node={other}; reason=always")
    (survivor,) = (node for node in prefills if node is not died)
    kill_while_sending(roles, decode, [survivor], "local; node=d1; reason=")

    back = roles.prefill("p1")
    roles.wait_ready(decode)
    text = roles.prompt(3)
    assert roles.check(text, roles.stream(decode, text)) == "remote; node=p1; reason=always"
    free(back, decode)


def kill_while_sending(roles: Roles, decode: Node, prefills: list[Node], expected: str) -> Node:
    """Kill one of them in the middle of a transfer; its request goes on as expected."""
    before = {node.name: sent(node) for node in prefills}
    failed = attempts(decode, FAILED)
    text = roles.prompt(40)
    stream = roles.stream(decode, text)
    victim = sending(prefills, before)
    assert state(decode, "fill") == 1
    victim.kill()
    others = [node.name for node in prefills if node is not victim]
    where = roles.check(text, stream)
    assert where.startswith(expected.format(other=others[0] if others else "")), where
    assert attempts(decode, FAILED) == failed + 1
    free(decode, *(node for node in prefills if node is not victim))
    return victim
