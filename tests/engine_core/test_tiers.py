"""A core with a host tier: what the device evicts comes back, and only as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import pytest
from msgspec.structs import replace

from pdserve.blocks.hashing import block_hashes, prompt_root
from pdserve.clock import ManualClock
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.tiers import core_tiers
from pdserve.errors import ConfigError
from pdserve.kv.tiers.virtual_io import VirtualTierIo
from pdserve.messages.engine import EngineSpec, SetHashSecret
from pdserve.messages.kv_events import BlockStored
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.messages.tiers import TierSpec
from pdserve.testing.inline_engine import InlineEngine
from pdserve.testing.scripted import ENGINE, ScriptedExecutor, reference_tokens
from pdserve.token_ids import token_ids

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.ids import Bytes
    from pdserve.kv.tiers.job_runner import JobRunner
    from pdserve.testing.output_checker import OutputChecker

BLOCK = 4
BLOCK_BYTES = BLOCK * 16
SPEC = EngineSpec(
    engine=ENGINE,
    model="",
    block_size=BLOCK,
    max_batch_tokens=64,
    max_sequences=8,
    hash_secret=b"one",
    options={"blocks": "16"},
    tiers=TierSpec(host_bytes=64 * BLOCK_BYTES),
)
DISK = TierSpec(host_bytes=20 * BLOCK_BYTES, disk_bytes=4 << 20, disk_owner="w")


def flip_payload_bytes(directory: Path) -> None:
    """Change a byte in the middle of every page of every segment that is no header."""
    for path in directory.glob("*/seg-*"):
        data = bytearray(path.read_bytes())
        for page in range(2 * 4096, len(data) - 4096, 8192):
            data[page + 17] ^= 0x40
        path.write_bytes(data)


class Bench:
    """An inline engine whose copies take simulated time."""

    def __init__(self, **changes: Any) -> None:
        self.clock = ManualClock()
        core = EngineCore(ScriptedExecutor(), self.clock)
        core.make_tier_io = self._make_io
        self.engine = InlineEngine(core, replace(SPEC, **changes))
        self.core = core
        assert core._tiers is not None
        self.lower = core._tiers.lower

    def _make_io(self, runner: JobRunner, block_bytes: Bytes, disk: bool) -> VirtualTierIo:
        self.io = VirtualTierIo(self.clock, block_bytes, runner)
        return self.io

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.core.close() == 0

    def hashes(self, request: GenerateRequest) -> list[bytes]:
        """Hashes of the prompt's full blocks."""
        root = prompt_root(b"one", "scripted", request.cache_salt)
        return [*block_hashes(request.prompt, BLOCK, parent=root, secret=b"one")]

    def stored(self) -> set[bytes]:
        """Blocks that were told to be on disk."""
        events = [each for each in self.engine.kv_events if isinstance(each, BlockStored)]
        return {name for each in events if each.tier == "disk" for name in each.hashes}

    @staticmethod
    def sources(found: OutputChecker) -> dict[str, int]:
        """Cached tokens of the first choice by their source."""
        started = found.starts[0]
        assert started is not None
        return {source.source: source.tokens for source in started.sources}

    def run(self, request: GenerateRequest) -> OutputChecker:
        """Submit and run to the end, with all copies."""
        found = self.engine.submit(request)
        for _ in range(1000):
            self.engine.step()
            self.core.pool.check()
            self.lower.check()
            self.clock.advance(0.01)
            if found.done and self.core.wake_at() is None:
                break
        assert found.done
        return found


def test_lanes_begin_with_what_was_measured(tmp_path: Path) -> None:
    tiers = replace(DISK, disk_path=str(tmp_path))
    core = EngineCore(ScriptedExecutor(), ManualClock())
    InlineEngine(core, replace(SPEC, tiers=tiers))
    measured = {lane.lane: lane.bandwidth for lane in core._lanes()}
    assert core.close() == 0
    assert set(measured) == {"d2h", "h2d", "disk_read", "disk_write"}
    assert all(measured.values())
    with Bench(tiers=tiers) as bench:
        assert not any(lane.bandwidth for lane in bench.core._lanes()), "its time is simulated"


def request(prompt: list[int], **changes: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids(prompt),
        sampling=SamplingParams(max_tokens=3, temperature=0.0),
        **changes,
    )


def prompt(start: int, blocks: int = 8) -> list[int]:
    return [10 + (start + i) % 80 for i in range(blocks * BLOCK + 1)]


def test_what_was_evicted_comes_back_from_the_host() -> None:
    bench = Bench()
    first = request(prompt(0))
    cold = bench.run(first)
    for start in (20, 40, 60):
        bench.run(request(prompt(start)))
    warm = bench.run(first)
    assert warm.tokens == cold.tokens == [reference_tokens(first)]
    (started,) = warm.starts
    assert started is not None
    assert started.cached_tokens == 8 * BLOCK
    assert [(s.source, s.tokens) for s in started.sources] == [("host", 8 * BLOCK)]
    assert bench.core.close() == 0


def test_what_was_evicted_from_the_host_comes_back_from_disk(tmp_path: Path) -> None:
    bench = Bench(tiers=replace(DISK, disk_path=str(tmp_path)))
    first = request(prompt(0))
    cold = bench.run(first)
    for start in range(10, 80, 7):
        bench.run(request(prompt(start)))
    assert bench.lower.host.frame(bench.hashes(first)[0]) is None
    warm = bench.run(first)
    assert warm.tokens == cold.tokens
    assert bench.sources(warm)["disk"] == 8 * BLOCK
    assert bench.core.close() == 0


def test_a_restarted_core_answers_from_disk(tmp_path: Path) -> None:
    tiers = replace(DISK, disk_path=str(tmp_path))
    first = request(prompt(0))
    with Bench(tiers=tiers) as bench:
        cold = bench.run(first)
    with Bench(tiers=tiers) as bench:
        assert bench.core.has_work, "routers learn of the disk before the first request"
        bench.engine.step()
        assert bench.stored() >= set(bench.hashes(first))
        warm = bench.run(first)
        assert warm.tokens == cold.tokens
        assert bench.sources(warm) == {"disk": 8 * BLOCK}
    with Bench(tiers=tiers, hash_secret=b"two") as bench:
        assert bench.sources(bench.run(first)) == {}


def test_a_flipped_byte_on_disk_is_a_miss(tmp_path: Path) -> None:
    tiers = replace(DISK, disk_path=str(tmp_path))
    first = request(prompt(0))
    with Bench(tiers=tiers) as bench:
        cold = bench.run(first)
    flip_payload_bytes(tmp_path)
    with Bench(tiers=tiers) as bench:
        warm = bench.run(first)
        assert warm.tokens == cold.tokens
        assert bench.sources(warm) == {}
        assert bench.core.stats().tiers[1].failed > 0


def test_under_another_secret_the_disk_holds_other_blocks_and_keeps_the_old(
    tmp_path: Path,
) -> None:
    tiers = replace(DISK, disk_path=str(tmp_path))
    first = request(prompt(0))
    with Bench(tiers=tiers) as bench:
        cold = bench.run(first)
        bench.core.handle(SetHashSecret(hash_secret=b"two"))
        again = bench.run(first)
        assert bench.sources(again) == {}
        assert again.tokens == cold.tokens
        bench.run(request(prompt(40)))
    for secret in (b"one", b"two"):
        with Bench(tiers=tiers, hash_secret=secret) as bench:
            assert bench.sources(bench.run(first)) == {"disk": 8 * BLOCK}


def test_a_large_disk_is_told_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_tiers, "EVENT_HASHES", 3)
    tiers = replace(DISK, disk_path=str(tmp_path))
    first = request(prompt(0))
    with Bench(tiers=tiers) as bench:
        bench.run(first)
    with Bench(tiers=tiers) as bench:
        steps = 0
        while bench.core.has_work:
            before = len(bench.stored())
            bench.engine.step()
            assert len(bench.stored()) - before <= 3
            steps += 1
        assert steps >= 3
        assert bench.stored() >= set(bench.hashes(first))
        parents = {e.parent for e in bench.engine.kv_events if isinstance(e, BlockStored)}
        assert bench.hashes(first)[2] in parents, "a piece follows the one before it"


def test_host_memory_that_cannot_be_had_names_its_flag_and_leaves_the_disk_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> None:
        raise ConfigError("no memory is left: lower --kv-memory")

    tiers = replace(DISK, disk_path=str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(core_tiers, "BlockMemory", none_left)
        core = EngineCore(ScriptedExecutor(), ManualClock())
        with pytest.raises(ConfigError, match="lower --host-kv"):
            core.load(replace(SPEC, tiers=tiers), lambda progress: None)
        core.close()
    with Bench(tiers=tiers):
        assert len([*tmp_path.glob("tier-*")]) == 1, "the same subdirectory is taken again"
