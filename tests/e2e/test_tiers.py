"""KV tiers in real processes: what was evicted comes back, also after everything was killed.

The sim engine's tokens depend on every byte of its KV. So an answer that equals the first, computed
one shows that what came back is right.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import pytest

from pdserve_engines.sim.tokens import entry_of
from tests.chaos.cluster import Cluster, eventually
from tests.e2e.server import serving
from tests.e2e.tiers import (
    BLOCK,
    BLOCKS,
    DEVICE,
    ENGINE,
    FRAME,
    REUSED,
    ask,
    command,
    prompt,
    restart,
    tier_count,
    wait_served,
    wait_tier,
)
from tests.support.metrics_page import find

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.chaos.cluster import Node
    from tests.e2e.server import Server
    from tests.e2e.tiers import Answer

pytestmark = pytest.mark.timeout(180)


@dataclass
class Pair:
    """Two workers whose disk tiers share a directory."""

    cluster: Cluster
    disk: Path
    front: Node
    workers: dict[str, Node]
    asked: dict[str, set[tuple[object, str]]] = field(default_factory=partial(defaultdict, set))
    """Prompts that each worker has seen in its present life, with their salts."""
    kept: dict[str, set[tuple[object, str]]] = field(default_factory=partial(defaultdict, set))
    """Those of its earlier lives, which are on disk."""

    def ask(self, worker: str, seed: object, salt: str = "") -> Answer:
        """Ask, and wait until the host has the prompt: a small device would evict it too soon."""
        answer = ask(self.front, prompt(seed), worker, **({"cache_salt": salt} if salt else {}))
        self.asked[worker].add((seed, salt))
        stored = BLOCKS * len(self.asked[worker])
        wait_tier(self.workers[worker], "host", "stored_blocks_total", stored)
        return answer

    def push_out(self, worker: str, seed: object) -> None:
        """Ask for other prompts until nothing older is on the worker's device."""
        for number in range(DEVICE // BLOCKS + 1):
            self.ask(worker, f"others {seed} {number}")

    def wait_written(self) -> None:
        """Until all that the workers have is on disk."""
        for name, node in self.workers.items():
            fresh = self.asked[name] - self.kept[name]
            wait_tier(node, "disk", "stored_blocks_total", BLOCKS * len(fresh))

    def restart(self, worker: str) -> None:
        """Start a worker that was killed, as it was started before."""
        self.workers[worker] = restart(self.cluster, self.workers[worker])
        self.kept[worker] |= self.asked.pop(worker)

    def directories(self) -> dict[str, str]:
        """The subdirectory that each worker's disk tier has."""
        return {name: directory_of(node) for name, node in self.workers.items()}

    def wait_ready(self) -> None:
        self.cluster.wait_ready()
        wait_served(self.front, *self.workers)

    def kill_all(self) -> None:
        """As when every machine loses its processes at once."""
        for node in self.cluster.nodes:
            if node.process.poll() is None:
                node.kill()

    def start_all(self) -> None:
        """Every process anew, the workers with their names and flags."""
        self.cluster.router(name="router-again")
        for name in self.workers:
            self.restart(name)
        self.front = self.cluster.frontend(name="frontend-again")
        self.wait_ready()


def directory_of(node: Node) -> str:
    """The subdirectory that it has opened last."""
    said = [r["message"].split() for r in node.records() if r["message"].startswith("disk tier /")]
    return str(said[-1][2])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("tiers")
    disk = folder / "disk"
    with Cluster(folder) as cluster:
        cluster.router()
        tiers = ("--host-kv", str(400 * FRAME), "--disk-kv", f"{disk}:64MiB")
        workers = {
            name: cluster.start("worker", name, "--join", cluster.address, *ENGINE, *tiers)
            for name in ("a", "b")
        }
        found = Pair(cluster, disk, cluster.frontend(), workers)
        found.wait_ready()
        yield found


# ---------------------------------------------------------------------- one life


def test_what_the_device_evicted_comes_back_from_host(pair):
    cold = [pair.ask("a", seed) for seed in range(4)]
    assert [answer.cached for answer in cold] == [{}] * 4
    worker = pair.workers["a"]
    before = tier_count(worker, "host", "hit_tokens_total")
    pair.push_out("a", "host")
    warm = [pair.ask("a", seed) for seed in range(4)]
    assert [answer.text for answer in warm] == [answer.text for answer in cold]
    assert [answer.cached for answer in warm] == [{"host": REUSED}] * 4
    wait_tier(worker, "host", "hit_tokens_total", before + 4 * REUSED)
    assert tier_count(worker, "host", "hit_tokens_total") == before + 4 * REUSED
    assert tier_count(worker, "disk", "hit_tokens_total") == 0


def test_a_prefix_is_on_the_device_and_its_rest_on_the_host(pair):
    cold = pair.ask("a", "mixed")
    pair.push_out("a", "mixed")
    half = ask(pair.front, prompt("mixed")[: 5 * BLOCK + 1], "a")
    assert half.cached == {"host": 5 * BLOCK}
    whole = pair.ask("a", "mixed")
    assert whole.cached == {"device": 5 * BLOCK, "host": 4 * BLOCK}
    assert whole.text == cold.text


def test_another_salt_hits_on_no_tier_and_at_no_other_worker(pair):
    mine = pair.ask("a", "salted", "alice")
    assert pair.ask("a", "salted", "bob").cached == {}, "on the device"
    pair.push_out("a", "salted")
    assert pair.ask("a", "salted", "carol").cached == {}, "on the host"
    assert pair.ask("b", "salted", "dave").cached == {}, "at the other worker"
    again = pair.ask("a", "salted", "alice")
    assert (again.text, again.cached) == (mine.text, {"host": REUSED})


def test_what_an_operator_drops_is_nowhere_any_more(pair):
    pair.ask("a", "stays", "other")
    for name in pair.workers:
        pair.ask(name, "dropped", "gone")
    pair.wait_written()
    assert on_disk(pair, "stays") == 1
    assert on_disk(pair, "dropped") == 2
    done = command(pair.cluster, "tier", "drop", "--salt", "gone")
    assert done.returncode == 0, done.stderr
    for name in pair.workers:
        assert re.search(rf"{name}: forgot blocks: .*\b{BLOCKS} on disk", done.stdout), done
    eventually(lambda: on_disk(pair, "dropped") == 0, "it is on disk still")
    assert on_disk(pair, "stays") == 1
    assert pair.ask("a", "dropped", "gone").cached == {}
    pair.asked["a"].add(("dropped, once more", "gone"))
    assert pair.ask("a", "stays", "other").cached


def on_disk(pair: Pair, seed: object) -> int:
    """How many workers have a prompt's last block on disk."""
    return copies(pair.disk, seed)


# ---------------------------------------------------------------------- one killed worker


@dataclass
class Before:
    """What was so before processes were killed."""

    answers: dict[str, Answer]
    directories: dict[str, str]


def written(pair: Pair, kind: str) -> Before:
    """Have each worker answer a prompt of its own, and wait until its KV is on disk."""
    answers = {name: pair.ask(name, f"{name} {kind}") for name in pair.workers}
    pair.wait_written()
    return Before(answers, pair.directories())


@pytest.fixture(scope="module")
def one_back(pair: Pair) -> Before:
    """Worker `a` was killed and started again, while `b` went on."""
    before = written(pair, "before one")
    pair.workers["a"].kill()
    pair.restart("a")
    pair.wait_ready()
    return before


def test_a_killed_worker_takes_its_own_part_of_a_shared_directory(pair, one_back):
    assert len(set(one_back.directories.values())) == 2
    assert pair.directories() == one_back.directories
    mine = pair.ask("a", "a before one")
    assert (mine.text, mine.cached) == (one_back.answers["a"].text, {"disk": REUSED})
    theirs = pair.ask("b", "b before one")
    assert (theirs.text, theirs.cached) == (one_back.answers["b"].text, {"device": REUSED})
    foreign = pair.ask("a", "b before one")
    assert (foreign.text, foreign.cached) == (theirs.text, {"peer": REUSED})


# ---------------------------------------------------------------------- one that stays dead

SMALL = "1MiB"
"""Size of a disk tier with segments of a few blocks, so that most of what is written is sealed."""


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """The files of a subdirectory, and when each was changed."""
    return {
        path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.glob("seg-*")
    }


@pytest.mark.long(one_in=3)
def test_what_a_dead_worker_sealed_is_read_by_another(tmp_path):
    """Two workers on one directory; one dies and stays dead. Nothing told the router or the other
    one of its blocks: the other finds them in the files."""
    with Cluster(tmp_path) as cluster:
        cluster.router()
        tiers = ("--host-kv", str(400 * FRAME), "--disk-kv", f"{tmp_path / 'disk'}:{SMALL}")
        a, b = (
            cluster.start("worker", name, "--join", cluster.address, *ENGINE, *tiers)
            for name in ("a", "b")
        )
        front = cluster.frontend()
        cluster.wait_ready()
        wait_served(front, "a", "b")
        cold = [ask(front, prompt(f"dead {seed}"), "a") for seed in range(6)]
        wait_tier(a, "disk", "stored_blocks_total", 6 * BLOCKS)
        a.kill()
        left = tmp_path / "disk" / directory_of(a).rpartition("/")[2].rstrip(":")
        before = contents(left)
        assert before
        wait_tier(b, "disk", "shared_blocks", 2 * BLOCKS)
        warm = ask(front, prompt("dead 0"), "b")
        assert (warm.text, warm.worker, warm.cached) == (cold[0].text, "b", {"disk": REUSED})
        wait_tier(b, "disk", "shared_read_blocks_total", BLOCKS - 1)
        assert tier_count(b, "disk", "shared_read_blocks_total") == BLOCKS - 1
        assert tier_count(b, "disk", "shared_read_failures_total") == 0
        assert contents(left) == before
        for path in left.glob("seg-*"):
            path.unlink()
        gone = ask(front, prompt("dead 1"), "b")
        assert (gone.text, gone.cached) == (cold[1].text, {})
        wait_tier(b, "disk", "shared_read_failures_total", 1)


# ---------------------------------------------------------------------- tenants

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789"


@pytest.mark.long
def test_tenants_share_no_tier_and_a_drop_leaves_no_bytes(tmp_path):
    keys, disk = tmp_path / "keys.toml", tmp_path / "disk"
    keys.write_text(
        f'[[key]]\nkey = "{ALICE}"\ntenant = "alice"\n[[key]]\nkey = "{BOB}"\ntenant = "bob"\n'
    )
    keys.chmod(0o600)
    with Cluster(tmp_path) as cluster:
        cluster.router()
        tiers = ("--host-kv", str(400 * FRAME), "--disk-kv", f"{disk}:64MiB")
        a, _ = (
            cluster.start("worker", name, "--join", cluster.address, *ENGINE, *tiers)
            for name in ("a", "b")
        )
        front = cluster.frontend("--api-keys-file", str(keys))
        cluster.wait_ready()
        eventually(lambda: served(front), "no worker is ready")
        mine = ask(front, prompt("alice"), "a", key=ALICE)
        ask(front, prompt("alice too"), "a", key=ALICE)
        bobs = ask(front, prompt("bob"), "a", key=BOB)
        wait_tier(a, "disk", "stored_blocks_total", 3 * BLOCKS)
        assert (copies(disk, "alice"), copies(disk, "bob")) == (1, 1)
        a.kill()
        a = restart(cluster, a)
        cluster.wait_ready()
        eventually(lambda: served(front), "no worker is ready")
        again = ask(front, prompt("alice"), "a", key=ALICE)
        assert (again.text, again.cached) == (mine.text, {"disk": REUSED})
        # On every tier of the worker that has it, and at one that may fetch it from there.
        for place, seed in (("a", "alice"), ("b", "alice too")):
            theirs = ask(front, prompt(seed), place, key=BOB, max_tokens=1, cache_scope="never")
            assert theirs.cached == {}, place
        done = command(cluster, "tier", "drop", "--tenant", "alice")
        assert done.returncode == 0, done.stderr
        for seed in ("alice", "alice too"):
            eventually(lambda seed=seed: copies(disk, seed) == 0, f"{seed} is on disk still")  # type: ignore[misc]
        assert copies(disk, "bob") == 1
        kept = ask(front, prompt("bob"), "a", key=BOB)
        assert (kept.text, kept.cached) == (bobs.text, {"disk": REUSED})
        assert ask(front, prompt("alice"), "a", key=ALICE).cached == {}


def served(front: Node) -> bool:
    """Whether both workers answer."""
    with contextlib.suppress(OSError, KeyError):
        return all(ask(front, prompt("hello", 1), name, key=BOB).text for name in ("a", "b"))
    return False


def copies(disk: Path, seed: object) -> int:
    """How many records on disk have the KV of a prompt's last block."""
    entry = b""
    for position, token in enumerate(prompt(seed)):
        entry = entry_of(token, position, entry)
    return sum(path.read_bytes().count(entry) for path in disk.rglob("seg-*"))


# ---------------------------------------------------------------------- everything killed


@pytest.fixture(scope="module")
def all_back(pair: Pair) -> Before:
    """Every process of the cluster was killed, and started again."""
    pair.ask("a", "salted", "erin")
    before = written(pair, "before all")
    pair.kill_all()
    pair.start_all()
    return before


def test_after_all_were_killed_first_answers_come_from_disk(pair, all_back):
    assert pair.directories() == all_back.directories
    for name, node in pair.workers.items():
        again = pair.ask(name, f"{name} before all")
        assert (again.text, again.cached) == (all_back.answers[name].text, {"disk": REUSED})
        wait_tier(node, "disk", "hit_tokens_total", REUSED)


def test_another_salt_does_not_hit_on_disk(pair, all_back):
    assert pair.ask("a", "salted", "frank").cached == {}
    assert pair.ask("a", "salted", "erin").cached == {"disk": REUSED}


def test_files_and_secret_are_their_owners_alone(pair, all_back):
    paths = [pair.disk, *pair.disk.rglob("*")]
    assert [path for path in paths if path.name.startswith("secret-")]
    assert len([path for path in paths if path.name.startswith("seg-")]) >= 2
    assert {path.stat().st_mode & 0o077 for path in paths} == {0}


# ---------------------------------------------------------------------- disks in trouble

FRAMES = 60
"""Blocks of the host: as many as are asked for after the disk was spoilt, so that earlier ones are
on disk alone then."""


@dataclass
class Troubled:
    """A worker whose disk takes nothing any more."""

    cluster: Cluster
    front: Node
    worker: Node
    stored: int = 0
    """Blocks that the host has taken in."""

    def ask(self, seed: object) -> Answer:
        return ask(self.front, prompt(seed), self.worker.name)

    def fill(self, first: int, blocks: int) -> list[Answer]:
        """Ask for prompts from number `first` on, each once the one before is on the host."""
        answers = []
        for seed in range(first, first + blocks // BLOCKS):
            answers.append(self.ask(seed))
            self.stored += BLOCKS
            wait_tier(self.worker, "host", "stored_blocks_total", self.stored)
        return answers

    def wait_trouble(self, cause: str) -> None:
        """Until the operator is told, with the cause."""
        self.worker.wait_count('pdserve_kv_tier_trouble{tier="disk"}', 1.0)
        shown = command(self.cluster, "status", "--join", self.cluster.address)
        assert re.search(rf"disk .*cannot write: {cause}", shown.stdout), shown


@contextlib.contextmanager
def troubled(folder: Path, disk: Path, size: str) -> Iterator[Troubled]:
    with Cluster(folder) as cluster:
        cluster.router()
        tiers = ("--host-kv", str(FRAMES * FRAME), "--disk-kv", f"{disk}:{size}")
        worker = cluster.start("worker", "w", "--join", cluster.address, *ENGINE, *tiers)
        found = Troubled(cluster, cluster.frontend(), worker)
        cluster.wait_ready()
        wait_served(found.front, "w")
        yield found


def cannot(reason: str) -> NoReturn:
    """Skip the test, unless the run asks for disks that fail."""
    if os.environ.get("PDSERVE_REQUIRE_DISK_FAULTS", "") not in ("", "0"):
        pytest.fail(f"PDSERVE_REQUIRE_DISK_FAULTS is set: {reason}", pytrace=False)
    pytest.skip(f"{reason}: it takes root, tmpfs and chattr")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 4 MiB."""
    disk = tmp_path / "small"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        cannot("nothing can be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def serves_on(world: Troubled, spoil: Callable[[], object], cause: str) -> None:
    """Spoil the disk: the operator learns it, requests go on, and what is on disk is read."""
    before = world.fill(0, 2 * BLOCKS)
    wait_tier(world.worker, "disk", "stored_blocks_total", 2 * BLOCKS)
    spoil()
    later = world.fill(100, FRAMES)
    world.wait_trouble(cause)
    again = [world.ask(seed) for seed in range(2)]
    assert [answer.text for answer in again] == [answer.text for answer in before]
    assert [answer.cached for answer in again] == [{"disk": REUSED}] * 2
    assert [world.ask(100 + number).text for number in range(len(later))] == [
        answer.text for answer in later
    ]
    assert world.front.get("/health")[0] == 200


@pytest.mark.long
def test_a_disk_that_fills_costs_no_request(tmp_path, small_disk):
    def fill() -> None:
        with (
            contextlib.suppress(OSError),
            (small_disk / "ballast").open("wb", buffering=0) as ballast,
        ):
            while True:
                ballast.write(bytes(4096))

    with troubled(tmp_path, small_disk, "3MiB") as world:
        serves_on(world, fill, "No space left on device")


@pytest.mark.long
def test_a_disk_that_becomes_read_only_is_still_read(tmp_path):
    disk = tmp_path / "disk"
    with troubled(tmp_path, disk, "64MiB") as world, writable_again(disk):
        serves_on(world, lambda: make_unwritable(disk), "Operation not permitted")


def make_unwritable(folder: Path) -> None:
    """Nothing below the folder can be written, also through open files."""
    attribute = ["chattr", "-R", "+i", str(folder)]
    if os.geteuid() or subprocess.run(attribute, capture_output=True, check=False).returncode:
        cannot("files cannot be made immutable here")


@contextlib.contextmanager
def writable_again(folder: Path) -> Iterator[None]:
    """Undo `make_unwritable`."""
    try:
        yield
    finally:
        subprocess.run(["chattr", "-R", "-i", str(folder)], capture_output=True, check=False)


# ---------------------------------------------------------------------- one process for all


@pytest.mark.long
def test_an_all_in_one_that_is_killed_answers_from_disk(tmp_path):
    """With the torch engine and its two workers, as in plain `pdserve`."""
    flags: tuple[str, ...] = ("--dtype", "float32", "--threads", "1", "--kv-memory", "64MiB")
    flags += ("--host-kv", "64MiB")
    flags += ("--disk-kv", f"{tmp_path / 'disk'}:256MiB", "--kv-fetch", "always")
    home = {"XDG_CONFIG_HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    tokens = prompt("all in one", 1) * 3
    with serving(None, *flags, **home) as server:
        cold = ask(server, tokens)
        assert cold.cached == {}
        blocks = len(tokens) // 32
        stored = 'pdserve_kv_tier_stored_blocks_total{mode="decode",tier="disk"}'
        eventually(lambda: counted(server, stored) >= blocks, "it is not on disk")
        server.end(signal.SIGKILL)
    with serving(None, *flags, **home) as server:
        again = ask(server, tokens)
        assert again.text == cold.text
        assert set(again.cached) == {"disk"}
        assert again.cached["disk"] == (blocks - 1) * 32


def counted(server: Server, metric: str) -> float:
    """A metric of an all-in-one; 0 before it is there."""
    return find(server.get("/metrics")[1], metric) or 0.0
