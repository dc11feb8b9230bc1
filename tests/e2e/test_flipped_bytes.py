"""One flipped bit of KV on its way, in real processes: noticed, counted, logged, and computed.

Workers that receive run the sim engine of `tests.support.flipping_engine`, whose tokens depend on
every byte. Host memory has no checksums: it is trusted like the device's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from tests.chaos.cluster import Cluster, eventually
from tests.e2e.tiers import (
    BLOCKS,
    ENGINE,
    FRAME,
    REUSED,
    ask,
    prompt,
    restart,
    tier_count,
    wait_served,
    wait_tier,
)
from tests.support import flipping_engine
from tests.support.flipping_engine import FLIPS, order, ordered
from tests.support.metrics_page import find

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.chaos.cluster import Node
    from tests.e2e.tiers import Answer

pytestmark = [pytest.mark.long(whole_file=True), pytest.mark.timeout(180)]

FLIPPING = ("--engine", f"{flipping_engine.__name__}:create", *ENGINE[2:])
BACKENDS = ("shm", "tcp")


@dataclass
class Workers:
    """One that sends, and receivers, each of which has a transport and a way to check."""

    cluster: Cluster
    folder: Path
    front: Node
    nodes: dict[str, Node] = field(default_factory=dict)

    def start(self, name: str, *flags: str) -> None:
        flips = {FLIPS: str(self.folder / f"{name}.flips")}
        join = ("--join", self.cluster.address)
        self.nodes[name] = self.cluster.start("worker", name, *join, *flags, **flips)

    def ask(self, worker: str, seed: object) -> Answer:
        return ask(self.front, prompt(seed), worker)

    def flip(self, worker: str) -> None:
        """The next arrival at this worker has a wrong byte."""
        order(self.folder / f"{worker}.flips", 1)

    def wait_flipped(self, worker: str) -> None:
        eventually(lambda: not ordered(self.folder / f"{worker}.flips"), "nothing was flipped")

    def wait_ready(self, *names: str) -> None:
        self.cluster.wait_ready()
        wait_served(self.front, *names)


def started(folder: Path, cluster: Cluster) -> Workers:
    cluster.router()
    return Workers(cluster, folder, cluster.frontend())


def counted(node: Node, metric: str) -> float:
    """A counter; 0 before it is there."""
    return find(node.get("/metrics", node.probes)[1], metric) or 0.0


# ---------------------------------------------------------------------- fetched from another worker

VERIFY = ("all", "off")
ASKERS = {
    f"{backend}-{verify}": ("--transfer", backend, "--verify-kv", verify)
    for backend in BACKENDS
    for verify in VERIFY
}


@pytest.fixture(scope="module")
def fetchers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    folder = tmp_path_factory.mktemp("flips")
    with Cluster(folder) as cluster:
        workers = started(folder, cluster)
        for verify in VERIFY:
            workers.start(f"owner-{verify}", *FLIPPING, "--verify-kv", verify)
        for name, flags in ASKERS.items():
            workers.start(name, *FLIPPING, *flags)
        workers.wait_ready(*workers.nodes)
        yield workers


@pytest.mark.parametrize("name", ASKERS)
def test_a_fetched_block_with_a_flipped_bit_is_computed(fetchers: Workers, name: str) -> None:
    """The transport notices it, or where it does not look, the comparison of every block."""
    asker, owner = fetchers.nodes[name], f"owner-{name.partition('-')[2]}"
    there = fetchers.ask(owner, name)
    fetchers.flip(name)
    again = fetchers.ask(name, name)
    fetchers.wait_flipped(name)
    assert again.text == there.text
    assert sum(again.cached.values()) < REUSED
    outcome = "corrupt" if name.endswith("off") else "transfer"
    asker.wait_count(f'pdserve_kv_pulls_ended_total{{outcome="{outcome}"}}', 1.0)
    asker.wait_said(r"has wrong bytes|checksum of")
    other = fetchers.ask(owner, f"{name} 2")
    whole = fetchers.ask(name, f"{name} 2")
    assert (whole.text, whole.cached) == (other.text, {"peer": REUSED}), "the path is good"


# ---------------------------------------------------------------------- handed over


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    folder = tmp_path_factory.mktemp("flips")
    with Cluster(folder) as cluster:
        workers = started(folder, cluster)
        workers.start("alone", *FLIPPING)
        workers.start("p", *FLIPPING, "--mode", "prefill", "--verify-kv", "all")
        for backend in BACKENDS:
            mode = ("--mode", "decode", "--disagg", "always")
            workers.start(backend, *FLIPPING, *mode, "--transfer", backend, "--verify-kv", "all")
        workers.wait_ready("alone", *BACKENDS)
        yield workers


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prompt_that_is_handed_over_with_a_flipped_bit_is_sent_again(
    decoders: Workers, backend: str
) -> None:
    node = decoders.nodes[backend]
    done = 'pdserve_handoff_attempts_total{outcome="done"}'

    def handed_over() -> bool:
        decoders.ask(backend, f"hello {len(node.lines)} {counted(node, done)}")
        return counted(node, done) > 0

    eventually(handed_over, "no prompt is prefilled elsewhere")
    right = decoders.ask("alone", f"{backend} handed over")
    decoders.flip(backend)
    assert decoders.ask(backend, f"{backend} handed over").text == right.text
    decoders.wait_flipped(backend)
    node.wait_count('pdserve_handoff_attempts_total{outcome="lost"}', 1.0)
    node.wait_said("checksum of")


# ---------------------------------------------------------------------- on disk


def test_a_flipped_bit_on_disk_is_a_miss(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with Cluster(tmp_path) as cluster:
        workers = started(tmp_path, cluster)
        workers.start("w", *ENGINE, "--host-kv", str(60 * FRAME), "--disk-kv", f"{disk}:64MiB")
        workers.wait_ready("w")
        cold = workers.ask("w", "rots")
        wait_tier(workers.nodes["w"], "disk", "stored_blocks_total", BLOCKS)
        workers.nodes["w"].kill()
        flip_third_record(disk)
        node = workers.nodes["w"] = restart(cluster, workers.nodes["w"])
        workers.wait_ready("w")
        again = workers.ask("w", "rots")
        assert again.text == cold.text
        assert sum(again.cached.values()) < REUSED
        wait_tier(node, "disk", "read_failures_total", 1)
        assert tier_count(node, "disk", "read_failures_total") == 1
        node.wait_said("a KV block was not read from disk: .*checksum")


def flip_third_record(disk: Path) -> None:
    """Flip a bit in the payload of the third block that was written."""
    (segment,) = (path for path in disk.rglob("seg-*") if path.stat().st_size > FRAME)
    with segment.open("r+b") as file:
        file.seek(4096 + 2 * (4096 + FRAME) + 4096 + FRAME // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))
