"""Measures how soon a cluster of real processes notices a failure, and how soon it serves again.

    python bench/chaos.py [--rounds N] [--write bench/results/chaos.md]

One router (or two), workers with `--engine=instant` and frontends run on one machine. The times are
read from the logs of their peers, with millisecond stamps of one clock. The scenarios and their
rules are in tests/chaos; this program only measures. Silent hosts need root, `ip` and `nft`, and
are left out without them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest

from bench.machine import facts
from tests.chaos.cluster import Cluster, Node
from tests.chaos.load import Stream, ask, running_on, warm_up
from tests.chaos.netns import network
from tests.chaos.test_partition import Hosts
from tests.chaos.test_security import NONSENSE, STRANGERS, address_of, say, stranger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent
PATIENCE = 60.0
PAUSE = 12.0
FACTS: list[str] = []
"""Sentences for the result."""
ROWS: dict[str, list[float]] = {}
"""Samples by what they measure, in seconds."""


def note(what: str, *seconds: float) -> None:
    """Stores and prints samples."""
    ROWS.setdefault(what, []).extend(seconds)
    print(f"{what:<64} " + " ".join(f"{value:7.3f}" for value in seconds), flush=True)


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster that is not checked when it ends."""
    with tempfile.TemporaryDirectory() as home:
        one = Cluster(Path(home))
        try:
            yield one
        finally:
            one.close(looking=False)


def answered(frontend: Node) -> float:
    """Returns the time of the first answered request; sends requests without a pause."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if ask(frontend, max_tokens=1).status == 200:
                return time.time()
        time.sleep(0.01)
    raise TimeoutError("nothing is served")


def seen(peers: list[Node], name: str, since: float, words: str = "died") -> list[float]:
    """Returns how long after `since` each peer logged the event."""
    return [peer.wait_said(f"{name} {words}", since - 0.01) - since for peer in peers]


def note_seen(what: str, times: list[float]) -> None:
    note(f"{what}: seen by each peer", *times)
    note(f"{what}: seen by all", max(times))


# ---------------------------------------------------------------------- scenarios


def kills(rounds: int) -> None:
    """Kills nodes with kill -9 in a cluster of six, under streams."""
    with cluster() as one:
        one.router()
        workers = [one.worker() for _ in range(3)]
        frontends = [one.frontend() for _ in range(2)]
        one.wait_ready()
        for _ in range(rounds):
            for role in ("worker", "router", "frontend"):
                alive = [node for node in one.nodes if node.process.poll() is None]
                workers = [node for node in alive if node.role == "worker"]
                frontends = [node for node in alive if node.role == "frontend"]
                for frontend in frontends:
                    warm_up(frontend, workers)
                streams = [Stream(frontends[i % 2], tokens=150) for i in range(12)]
                for stream in streams:
                    stream.wait_tokens(1)
                running_on(workers, len(streams))
                victim = next(node for node in alive if node.role == role)
                peers = [node for node in alive if node is not victim]
                when = victim.kill()
                note_seen(f"kill -9 of a {role}", seen(peers, victim.name, when))
                for stream in streams:
                    stream.wait()
                lost = [stream.ended_at - when for stream in streams if stream.code]
                if lost:
                    note("kill -9 of a worker: its streams end with worker_lost", *lost)
                getattr(one, role)(name=victim.name).wait_ready()


def heals(rounds: int) -> None:
    """Kills the only node of a role and restarts it at once."""
    with cluster() as one:
        nodes = {"router": one.router(), "worker": one.worker(), "frontend": one.frontend()}
        one.wait_ready()
        answered(nodes["frontend"])
        for _ in range(rounds):
            for role in tuple(nodes):
                when = nodes[role].kill()
                nodes[role] = getattr(one, role)(name=nodes[role].name)
                nodes["frontend"].wait_for_line("listening on")
                note(f"the only {role} killed and started again: serves", since(nodes, when))


def since(nodes: dict[str, Node], when: float) -> float:
    return answered(nodes["frontend"]) - when


def pauses() -> None:
    """Stops a node with SIGSTOP for so long that it is declared dead."""
    with cluster() as one:
        router = one.router()
        workers = [one.worker() for _ in range(2)]
        frontend = one.frontend()
        one.wait_ready()
        warm_up(frontend, workers)
        for victim in (workers[0], router, frontend):
            peers = [node for node in one.nodes if node is not victim]
            when = victim.pause()
            note_seen(f"SIGSTOP for {PAUSE:.0f} s", seen(peers, victim.name, when))
            time.sleep(max(0.0, when + PAUSE - time.time()))
            back = victim.resume()
            note("SIGCONT: back with a new epoch, seen by all",
                 max(seen(peers, victim.name, back, "joined")))  # fmt: skip
            note("SIGCONT: a request is answered", answered(frontend) - back)


def silences(rounds: int) -> None:
    """Lets a host drop all packets, in and out."""
    with network() as net, cluster() as one:
        hosts = Hosts(net, one, one.home)
        router = hosts.start("router")
        engine = ("--engine", "instant", "--engine-option", "tokens_per_second=50")
        workers = [hosts.start("worker", *engine) for _ in range(3)]
        frontend = hosts.start("frontend")
        one.wait_ready()
        warm_up(frontend, workers)
        for _ in range(rounds):
            for victim in (*workers, router):
                peers = [node for node in one.nodes if node is not victim]
                hosts.of[victim.name].silent()
                when = time.time()
                note_seen("a host falls silent", seen(peers, victim.name, when))
                hosts.of[victim.name].heal()
                healed = time.time()
                note("a silent host speaks again: known to all",
                     max(seen(peers, victim.name, healed, "joined")))  # fmt: skip
            warm_up(frontend, workers)


def crowd() -> None:
    """Connects clients without a key to the cluster ports."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2 * STRANGERS, hard)), hard))
    with cluster() as one:
        router, (worker,), frontend = one.serving(rate=20)
        nodes = (router, worker, frontend)
        ports = [address_of(node) for node in nodes]
        answered(frontend)
        stream = Stream(frontend, tokens=1900)
        stream.wait_tokens(1)
        before = [node.rss() for node in nodes]
        said = 0
        with contextlib.ExitStack() as strangers:
            for i in range(STRANGERS):
                strangers.enter_context(stranger(ports[0] if i % 10 < 8 else ports[1 + i % 2], i))
            for _ in range(5):
                for port in ports:
                    for words in NONSENSE:
                        say(port, words)
                        said += 1
                stream.wait_tokens(1)
        grown = max(now.rss() - then for now, then in zip(nodes, before, strict=True)) / (1 << 20)
        stream.hang_up()
    FACTS.append(
        f"{STRANGERS:,} half-open connections and {said} malformed beginnings at the cluster "
        f"ports: none was let in, the\nstream went on, resident memory grew by {grown:.1f} MiB at "
        "most."
    )
    print(FACTS[-1], flush=True)


# ---------------------------------------------------------------------- the result


def row(what: str, values: list[float]) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"| {what} | {middle:.2f} | {low:.2f} | {high:.2f} | {len(values)} |"


def report(skipped: list[str]) -> str:
    """Returns the result file."""
    rows = "\n".join(row(what, values) for what, values in ROWS.items())
    machine = "\n".join(f"- {fact}" for fact in facts())
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    facts_ = "\n".join(FACTS)
    left_out = "".join(f"\nNot measured here: {why}\n" for why in skipped)
    return f"""# Ends of real processes and hosts

What a cluster on one machine sees of them, and when it serves again; seconds, from the peers' logs
and from clients. Repeat with `python bench/chaos.py`.

- Kills: one router, three workers, two frontends, twelve paced streams; each role in turn.
- Heals: one of each; the killed one is started again at once, under its name. Starting an
  interpreter and loading is part of the time.
- Pauses: one router, two workers, one frontend; all processes of a node are stopped.
- Silent hosts: five namespaces on a bridge, nftables drop everything in and out of one.

{machine}
- Load averages at the end: {load} (other work ran on the machine)

| what | median | least | most | samples |
|---|---:|---:|---:|---:|
{rows}
{left_out}
{facts_}

A crash is seen through its connections, whose ends the kernel closes; silence by two missed pings,
a question to others, and a suspicion of 4 s that the silent one may refute, see `docs/gossip.md`.
What holds in each scenario, request by request, is asserted by tests/chaos.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path, default=HERE / "results" / "chaos.md")
    options = parser.parse_args()
    skipped: list[str] = []
    parts: tuple[Callable[[], None], ...] = (
        lambda: kills(options.rounds),
        lambda: heals(options.rounds),
        pauses,
        crowd,
        lambda: silences(1 + options.rounds // 5),
    )
    for part in parts:
        try:
            part()
        except pytest.skip.Exception as why:
            skipped.append(str(why))
    options.write.write_text(report(skipped))


if __name__ == "__main__":
    main()
