"""Faults while prompts are computed on one worker for another: nobody is served a wrong token.

Prefill workers are slow, so that KV moves for seconds; what both workers count shows that a fault
fell into a transfer. Every text is compared with that of a worker that does everything by itself:
tokens follow from the bytes of all blocks.
"""

from __future__ import annotations

import re
import time
from functools import partial
from typing import Any

import psutil
import pytest

from tests.chaos.cluster import Cluster, Node, eventually, holding
from tests.chaos.load import Stream, wait_served
from tests.chaos.netns import network
from tests.chaos.test_partition import Hosts

pytestmark = pytest.mark.timeout(300)

SOON = 1.0
"""Seconds after which both workers are free of a request that nobody wants."""
REPORTED = 1.0
"""Numbers of an engine may be late by this."""
PAUSE = 2.0
"""Of a process; one of five seconds may not be buried."""
STEP = 32
"""Prompt tokens that a prefill worker computes, and sends, at a time: a block."""
SIM = ("--engine", "sim", "--engine-option", "content=on", "--engine-option", "blocks=1024")
SLOW = ("--engine-option", "slowdown=15", "--max-batch-tokens", str(STEP), "--max-sequences", "4")
"""A tenth of a second for each block."""
_ALONE = ("--no-migration",)
"""The frontend's: here a decode worker that dies takes its requests along, and the rest lets go."""


class Roles:
    """A cluster with prefill workers p1…, decode workers d1… and one that does it all."""

    def __init__(self, cluster: Cluster, transfer: str = "auto") -> None:
        self.cluster = cluster
        self.transfer = transfer
        self.routers = [cluster.router()]
        self.alone = self.worker("alone", "--engine-option", "slowdown=0")
        self.frontend = cluster.frontend(*_ALONE)
        self._prompts = 0

    @property
    def _flags(self) -> tuple[str, ...]:
        return (*SIM, "--verify-kv", "all", "--transfer", self.transfer)

    def worker(self, name: str, *flags: str) -> Node:
        join = ("--join", self.cluster.address)
        return self.cluster.start("worker", name, *join, *self._flags, *flags)

    def prefill(self, name: str) -> Node:
        return self.worker(name, "--mode", "prefill", *SLOW)

    def decode(self, name: str) -> Node:
        return self.worker(name, "--mode", "decode", "--disagg", "always")

    def wait_ready(self, *decode: Node) -> None:
        """Until prompts of these are computed elsewhere."""
        self.cluster.wait_ready()
        for node in decode:
            eventually(partial(self._remote, node), "\n".join(node.lines))

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
    return sum(
        map(float, re.findall(rf"^pdserve_(?:{pattern})(?:\{{.*\}})? (\S+)$", page, re.MULTILINE))
    )


def state(node: Node, name: str) -> float:
    """How many handoffs are in it."""
    return total(node, rf'handoffs{{state="{name}"}}')


def attempts(node: Node, outcome: str = "[a-z]+") -> float:
    return total(node, rf'handoff_attempts_total{{outcome="{outcome}"}}')


RECEIVED = 'transfer_bytes_total{backend="tcp",direction="received"}'


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


def unqueued(*routers: Node) -> None:
    """Nothing waits and nothing is claimed, soon."""
    pattern = r"prefill_queue_(?:items|claims){.*}"
    eventually(
        lambda: not any(total(router, pattern) for router in routers), "a queue keeps something", 10
    )


def descriptors(node: Node) -> int:
    """Of the worker and its engine."""
    me = psutil.Process(node.process.pid)
    return sum(process.num_fds() for process in (me, *me.children(recursive=True)))


# ---------------------------------------------------------------------- prefill workers


@pytest.fixture
def roles(cluster: Cluster) -> Roles:
    return Roles(cluster)


@pytest.mark.parametrize("backend", ["shm", pytest.param("tcp", marks=pytest.mark.long)])
def test_a_killed_prefill_worker_is_a_later_first_token(cluster, backend):
    roles = Roles(cluster, backend)
    prefills, decode = [roles.prefill("p1"), roles.prefill("p2")], roles.decode("d1")
    roles.wait_ready(decode)
    for text in [roles.prompt(6) for _ in range(4)]:  # by both: all paths are there
        roles.stream(decode, text)
    free(*prefills, decode)
    before = descriptors(decode)

    died = kill_while_sending(roles, decode, prefills, "remote; node={other}; reason=always")
    (survivor,) = (node for node in prefills if node is not died)
    kill_while_sending(roles, decode, [survivor], "local; node=d1; reason=no_prefill_worker")

    back = roles.prefill("p1")
    roles.wait_ready(decode)
    text = roles.prompt(3)
    assert roles.check(text, roles.stream(decode, text)) == "remote; node=p1; reason=always"
    free(back, decode)
    unqueued(*roles.routers)
    eventually(lambda: descriptors(decode) <= before, "paths to the dead are closed")


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


@pytest.mark.long
def test_a_short_pause_of_a_prefill_worker_is_nothing(roles):
    prefill, decode = roles.prefill("p1"), roles.decode("d1")
    roles.wait_ready(decode)
    before, failed = {"p1": sent(prefill)}, attempts(decode, FAILED)
    text = roles.prompt(40)
    stream = roles.stream(decode, text)
    sending([prefill], before)
    with holding(roles.cluster, prefill):
        time.sleep(PAUSE)
        assert state(decode, "fill") == 1
    assert roles.check(text, stream) == "remote; node=p1; reason=always"
    assert attempts(decode, FAILED) == failed
    free(prefill, decode)


@pytest.mark.long
def test_a_frozen_prefill_worker_is_passed_over_and_comes_back(roles):
    prefills, decode = [roles.prefill("p1"), roles.prefill("p2")], roles.decode("d1")
    roles.wait_ready(decode)
    before, failed = {node.name: sent(node) for node in prefills}, attempts(decode, FAILED)
    text = roles.prompt(40)
    stream = roles.stream(decode, text)
    victim = sending(prefills, before)
    (other,) = (node for node in prefills if node is not victim)
    with holding(roles.cluster, victim):
        assert roles.check(text, stream) == f"remote; node={other.name}; reason=always"
        assert attempts(decode, FAILED) == failed + 1
        decode.wait_said(f"{victim.name} died")
        free(other, decode)  # nothing is quarantined for ever
    victim.wait_said("rejoining with epoch")
    free(victim)
    texts = [roles.prompt(10) for _ in range(6)]
    found = {roles.check(*one) for one in [(t, roles.stream(decode, t)) for t in texts]}
    wanted = {f"remote; node={node.name}; reason=always" for node in prefills}
    assert found == wanted, "both take prompts again"
    free(*prefills, decode)


@pytest.mark.long
def test_an_engine_that_dies_in_a_transfer_is_a_failed_attempt(roles):
    """The nodes live on: first the prefill worker's engine dies, then the decode worker's."""
    prefill, decode = roles.prefill("p1"), roles.decode("d1")
    roles.wait_ready(decode)
    for victim in (prefill, decode):
        before, failed = {"p1": sent(prefill)}, attempts(decode, FAILED)
        text = roles.prompt(40)
        stream = roles.stream(decode, text)
        sending([prefill], before)
        victim.expected_errors = True
        victim.core().kill()
        if victim is prefill:
            assert roles.check(text, stream).startswith(("local; node=d1", "remote; node=p1"))
            assert attempts(decode, FAILED) > failed
        else:
            assert stream.wait().code == "engine_died", stream
        roles.wait_ready(decode)
        free(prefill, decode)
        text = roles.prompt(3)
        assert roles.check(text, roles.stream(decode, text)) == "remote; node=p1; reason=always"


class OnHosts(Roles):
    """Each node on a host of its own, named by its role and number."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.cluster = hosts.cluster
        self.transfer = "tcp"
        self.routers = [hosts.start("router")]
        self.alone = self.worker("", "--engine-option", "slowdown=0")
        self.frontend = hosts.start("frontend", *_ALONE)
        self._prompts = 0

    def worker(self, name: str, *flags: str) -> Node:
        return self.hosts.start("worker", *self._flags, *flags)


@pytest.mark.long
def test_a_path_that_falls_silent_is_given_up_and_made_again(tmp_path):
    """Nobody dies: the cluster's links go on, what carries KV does not."""
    with network() as net, Cluster(tmp_path) as cluster:
        hosts = Hosts(net, cluster, tmp_path)
        roles = OnHosts(hosts)
        prefill, decode = roles.prefill(""), roles.decode("")
        roles.wait_ready(decode)
        remote = f"remote; node={prefill.name}; reason=always"
        before, failed = {prefill.name: sent(prefill)}, attempts(decode, FAILED)
        text = roles.prompt(40)
        stream = roles.stream(decode, text)
        sending([prefill], before)
        ours, theirs = hosts.of[decode.name], hosts.of[prefill.name]
        bulk = "tcp sport != 7700 tcp dport != 7700 drop"
        ours.rules(f"ip saddr {theirs.address} {bulk}")
        theirs.rules(f"ip saddr {ours.address} {bulk}")
        assert roles.check(text, stream).startswith(f"local; node={decode.name}")
        assert attempts(decode, FAILED) > failed
        net.heal()
        eventually(
            lambda: roles.answer(decode, roles.prompt(2)).headers["x-pdserve-prefill"] == remote,
            "prompts are computed elsewhere again",
        )
        text = roles.prompt(3)
        assert roles.check(text, roles.stream(decode, text)) == remote
        free(prefill, decode)
        assert not any(node.said("died, life") for node in cluster.nodes)


RANKS = ("--engine", "torch", "--dtype", "float32", "--threads", "1", "--kv-memory", "16MiB")
"""The bundled model, which has two KV heads: of four ranks two hold each."""


@pytest.mark.long
def test_ranks_of_different_hosts_exchange_kv_by_the_clusters_addresses(tmp_path):
    """Ranks meet on their host's loopback; what other hosts dial is the node's own address."""
    with network() as net, Cluster(tmp_path) as cluster:
        hosts = Hosts(net, cluster, tmp_path)
        hosts.start("router")
        engine = (*RANKS, "--verify-kv", "all", "--transfer", "tcp")
        prefill = hosts.start("worker", *engine, "--mode", "prefill", "--tp", "4")
        decode = hosts.start("worker", *engine, "--mode", "decode", "--disagg", "always", "--tp=2")
        alone = hosts.start("worker", *RANKS)
        frontend = hosts.start("frontend", *_ALONE)
        for node in cluster.nodes:
            node.wait_ready()  # seven processes that load at once take longer than one may
        remote = f"remote; node={prefill.name}; reason=always"

        def answer(node: Node, text: str) -> Any:
            return wait_served(frontend, worker=node.name, **_asked(text))

        eventually(
            lambda: answer(decode, "hello").headers["x-pdserve-prefill"] == remote, "not remote"
        )
        before = total(decode, RECEIVED)
        for length in (1, 3, 40):
            text = f"{length} {'~' * (STEP * length)}"
            found = answer(decode, text)
            assert found.headers["x-pdserve-prefill"] == remote
            assert found.body["choices"] == answer(alone, text).body["choices"]
        eventually(lambda: total(decode, RECEIVED) > before, "no bytes")
        assert not any(node.said("Traceback") for node in cluster.nodes)


# ---------------------------------------------------------------------- the queue's router


def queued(router: Node) -> float:
    return total(router, r"prefill_queue_items{.*}")


@pytest.mark.long
def test_a_killed_queue_comes_again_at_another_router(roles):
    roles.routers.append(roles.cluster.router())
    prefill, decode = roles.prefill("p1"), roles.decode("d1")
    roles.wait_ready(decode)
    failed = attempts(decode, FAILED)
    texts = [roles.prompt(20) for _ in range(5)]
    streams = [roles.stream(decode, text) for text in texts]
    owner: Node = eventually(
        lambda: next((r for r in roles.routers if queued(r)), None), lambda: decode.lines
    )
    eventually(lambda: state(decode, "fill") and state(decode, "queue"), "prompts wait")
    owner.kill()
    found = [roles.check(text, stream) for text, stream in zip(texts, streams, strict=True)]
    assert set(found) == {"remote; node=p1; reason=always"}
    assert attempts(decode, FAILED) == failed, "open attempts go on"
    free(prefill, decode)

    back = roles.cluster.router(name=owner.name)
    prefill.wait_said(f"{owner.name} joined", since=time.time() - 5)
    back.wait_ready()

    def remote() -> bool:
        """Until its queue has heard of the prefill worker, prompts are computed where they are."""
        text = roles.prompt(3)
        return roles.check(text, roles.stream(decode, text)) == "remote; node=p1; reason=always"

    eventually(remote, lambda: decode.lines)
    (other,) = (router for router in roles.routers if router is not owner)
    unqueued(back, other)


@pytest.mark.long
def test_a_frozen_queue_is_left_and_comes_back(roles):
    roles.routers.append(roles.cluster.router())
    prefill, decode = roles.prefill("p1"), roles.decode("d1")
    roles.wait_ready(decode)
    texts = [roles.prompt(20) for _ in range(5)]
    streams = [roles.stream(decode, text) for text in texts]
    owner: Node = eventually(
        lambda: next((r for r in roles.routers if queued(r)), None), lambda: decode.lines
    )
    with holding(roles.cluster, owner):
        found = [roles.check(text, stream) for text, stream in zip(texts, streams, strict=True)]
        decode.wait_said(f"{owner.name} died")
    assert set(found) == {"remote; node=p1; reason=always"}
    owner.wait_said("rejoining with epoch")
    roles.wait_ready(decode)
    free(prefill, decode)
    unqueued(*roles.routers)


# ---------------------------------------------------------------------- decode workers


@pytest.mark.long
def test_a_killed_decode_worker_frees_its_prefill_worker(roles):
    prefill = roles.prefill("p1")
    decode, other = roles.decode("d1"), roles.decode("d2")
    roles.wait_ready(decode, other)
    before = {"p1": sent(prefill)}
    text = roles.prompt(40)
    streams = [roles.stream(decode, text), roles.stream(decode, roles.prompt(40))]
    sending([prefill], before)
    killed = decode.kill()
    for stream in streams:
        stream.wait()
        assert stream.code == "worker_lost", stream
        assert stream.ended_at - killed < 5, "the client learns it when the cluster does"
    free(prefill)
    assert roles.check(text, roles.stream(other, text)) == "remote; node=p1; reason=always"
    back = roles.decode("d1")
    roles.wait_ready(back)
    assert roles.check(text, roles.stream(back, text)) == "remote; node=p1; reason=always"
    free(prefill, other, back)
    unqueued(*roles.routers)


@pytest.mark.long
def test_a_frozen_decode_worker_is_forgotten_and_comes_back(roles):
    prefill = roles.prefill("p1")
    decode, other = roles.decode("d1"), roles.decode("d2")
    roles.wait_ready(decode, other)
    before = {"p1": sent(prefill)}
    text = roles.prompt(40)
    stream = roles.stream(decode, text)
    sending([prefill], before)
    with holding(roles.cluster, decode):
        assert stream.wait().code == "worker_lost", stream
        prefill.wait_said("d1 died")
        free(prefill)
        assert roles.check(text, roles.stream(other, text)) == "remote; node=p1; reason=always"
    decode.wait_said("rejoining with epoch")
    roles.wait_ready(decode)
    assert roles.check(text, roles.stream(decode, text)) == "remote; node=p1; reason=always"
    free(prefill, decode, other)


# ---------------------------------------------------------------------- clients that go


def test_who_hangs_up_frees_both_workers_at_once(roles):
    """While queued, while its KV comes, and when all has been said and some has not arrived."""
    prefill, decode = roles.prefill("p1"), roles.decode("d1")
    roles.wait_ready(decode)
    free(prefill, decode)
    before = [descriptors(node) for node in (prefill, decode)]

    streams = [roles.stream(decode, roles.prompt(40)) for _ in range(5)]
    eventually(lambda: state(decode, "queue") and state(decode, "fill"), "both at once")
    for stream in streams:
        stream.hang_up()
    free(prefill, decode, within=SOON + REPORTED)

    for _ in range(3):
        stream = roles.stream(decode, roles.prompt(40))
        sending([prefill], {"p1": sent(prefill)})
        assert state(decode, "fill") == 1
        stream.hang_up()
        free(prefill, decode, within=SOON + REPORTED)

    stream = roles.stream(decode, roles.prompt(10))
    eventually(lambda: state(decode, "fill"), "it has blocks")
    core = decode.core()
    core.suspend()  # the node hears of the handoff, its engine takes nothing in
    try:
        eventually(lambda: state(decode, "verify"), lambda: decode.lines)
        stream.hang_up()
        eventually(lambda: not total(decode, r"handoffs{.*}"), "the node forgets it", SOON)
    finally:
        core.resume()
    free(prefill, decode, within=SOON + REPORTED)
    unqueued(*roles.routers)
    assert attempts(decode, "unwanted") >= 5
    assert [descriptors(node) for node in (prefill, decode)] == before
    text = roles.prompt(3)
    assert roles.check(text, roles.stream(decode, text)) == "remote; node=p1; reason=always"
