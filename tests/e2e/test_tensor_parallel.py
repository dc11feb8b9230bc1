"""Ranks of one model as real processes: prompts and streams that move between unequal sizes, and
ranks that are lost.

A worker without ranks is the oracle. Counters show that KV came from the other worker, and how many
bytes of it.
"""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from pdserve import accel
from pdserve.launch import exit_codes
from pdserve.protocols.sse import SseDecoder
from tests.chaos.cluster import Cluster, eventually
from tests.e2e.commands import pdserve
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
    total,
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
LOADING = 100
"""Seconds in which four ranks load on a busy machine."""


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
            node = cluster.start("worker", name, "--join", cluster.address, *flags)
            node.wait_ready()  # eight processes that load at once take longer than one may
            return node

        prefill = worker("prefill", "--mode", "prefill", "--tp", "2")
        decode = {
            backend: worker(
                *(backend, "--mode", "decode", "--disagg", "always"),
                # The other one is reached by tcp, too, and takes its streams.
                *("--transfer", "auto" if backend == "shm" else backend),
                *("--tp", str(SIZES[backend])),
            )
            for backend in BACKENDS
        }
        worker("alone")
        # A stream that asked for its worker by name waits until the four ranks have loaded again.
        frontend = cluster.frontend("--worker-wait", str(LOADING))
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
    complete(roles)


def command(roles: Roles, *arguments: str) -> None:
    done = pdserve(roles.cluster, *arguments)
    assert done.returncode == exit_codes.OK, done


def status(roles: Roles) -> Any:
    return json.loads(pdserve(roles.cluster, "status", "--json").stdout)


def member(roles: Roles, name: str) -> Any:
    return next(one for one in status(roles)["members"] if one["node"] == name)


def states(roles: Roles, name: str) -> list[str]:
    """Of the ranks of a worker, by its report."""
    report = member(roles, name)["report"] or {"ranks": ()}
    return [one["state"] for one in report["ranks"]]


def complete(roles: Roles) -> None:
    """Wait until all four ranks serve."""
    eventually(
        lambda: states(roles, "tcp") == ["running"] * 4, lambda: member(roles, "tcp"), LOADING
    )
    eventually(partial(reached, roles, "tcp"), "tcp is not reached")


def test_status_shows_the_ranks_and_what_their_tokens_promise(roles: Roles) -> None:
    complete(roles)
    ranks = member(roles, "tcp")["report"]["ranks"]
    below = ranks_of(roles.decode["tcp"])
    assert [one["rank"] for one in ranks] == [0, 1, 2, 3]
    assert [one["pid"] for one in ranks[1:]] == [one.pid for one in below]
    assert [one["pid"] for one in ranks[:1]] == [below[0].ppid()]
    assert {(one["device"], one["state"]) for one in ranks} == {("cpu", "running")}
    assert member(roles, "alone")["report"]["ranks"] == []
    assert "RANKS OF" in pdserve(roles.cluster, "status").stdout
    assert member(roles, "tcp")["tokens"] == ["close (float32)"]
    if accel.NATIVE:
        assert member(roles, "alone")["tokens"][0].startswith("exact (native ")
    assert [one["tokens"] for one in status(roles)["models"]] == ["close (float32)"]


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_is_lost_without_work_ends_the_engine(
    roles: Roles, how: signal.Signals
) -> None:
    """Nothing is asked of the worker: it notices by itself, within `rank_timeout` and a moment."""
    complete(roles)
    decode = roles.decode["tcp"]
    decode.expected_errors = True
    before = ranks_of(decode)
    before[1].send_signal(how)
    # Only time counts in which rank 0 itself has looked.
    eventually(lambda: not any(one.is_running() for one in before), "old ranks are left", LOADING)
    fields: dict[str, Any] = {"prompt": tokens(20, f"lost by {how}"), "max_tokens": 8}
    expected = ask(roles, "alone", **fields).body["choices"]
    assert ask(roles, "!alone", **fields).body["choices"] == expected
    complete(roles)
    assert ask(roles, "tcp", **fields).body["choices"] == expected


def test_a_stream_of_four_ranks_moves_when_their_worker_changes_its_mode(roles: Roles) -> None:
    """To a worker without ranks, which fetches the KV; the worker then comes back."""
    fields: dict[str, Any] = {"prompt": tokens(300, "moves"), "max_tokens": 1500}
    expected = ask(roles, "alone", **fields).body["choices"][0]["text"]
    other = roles.decode["shm"]
    decisions = 'pdserve_prefill_decisions_total{reason="source",where="remote"}'
    before = total(other, decisions)
    stream = SseDecoder()
    # A stream that asks for a worker by name would stay there, so the others are out of the way.
    command(roles, "drain", "shm", "--stay", "--wait")
    with opened(roles, "!alone", "/v1/completions", fields | {"stream": True}) as answer:
        assert answer.headers["x-pdserve-worker"] == "tcp"
        text = text_of(stream, answer.read1())
        command(roles, "drain", "shm", "--undo")
        command(roles, "mode", "tcp", "prefill", "--wait")
        text += text_of(stream, answer.read())
    assert text == expected
    eventually(lambda: total(other, decisions) > before, "nothing came with its KV", 10)
    assert member(roles, "tcp")["report"]["mode"]["mode"] == "prefill"
    command(roles, "mode", "tcp", "decode", "--wait")
    eventually(partial(reached, roles, "tcp"), "tcp is not reached")


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
