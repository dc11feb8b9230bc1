"""Measures what it gains to begin a prefill before all layers of its prefix have come.

A simulated worker with the production code of scheduler and tiers: a prompt's first 8,000 tokens
are in host memory, from where they come in as long as it takes to compute the rest (O = P). Without
overlap the first token takes O + P; in G groups of layers at best P + P / G. Times are simulated,
so they are the same on every machine.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from pdserve.clock import ManualClock
from pdserve.kv.tiers.layer_groups import LayerGroups
from pdserve.messages.engine import EngineSpec, StepOutput, Submit
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.messages.tiers import TierSpec
from pdserve.token_ids import token_ids
from pdserve_engines.sim import SimExecutor

if TYPE_CHECKING:
    from pdserve.ids import Bytes, Seconds

__all__ = ["overlap", "rows"]

BLOCK: Final = 16
CACHED: Final = 8000
REST: Final = 1000
VOCAB: Final = 997


class _Worker:
    """A simulated worker with a host tier."""

    def __init__(self, groups: int, bandwidth: float) -> None:
        """`groups`: layer groups that blocks come in."""
        self._clock = ManualClock()
        self._core = SimExecutor().make_core(self._clock)
        self._handles = 0
        spec = EngineSpec(
            engine="sim",
            model="",
            block_size=BLOCK,
            max_batch_tokens=CACHED + REST,
            max_sequences=8,
            max_model_len=CACHED + REST + BLOCK,
            hash_secret=bytes(32),
            options={"vocab": str(VOCAB), "blocks": "1024", "host_bandwidth": str(bandwidth)},
            tiers=TierSpec(host_bytes=32 << 30),
        )
        capabilities = self._core.load(spec, lambda progress: None)
        self.block_bytes: Bytes = capabilities.block_bytes
        assert self._core._tiers is not None
        lower = self._core._tiers.lower
        assert lower.layers is not None
        lower.layers = LayerGroups(lower.layers.layers, self.block_bytes, groups)

    def ask(self, prompt: list[int]) -> Seconds:
        """The time to the prompt's first token; everything else ends too."""
        self._handles += 1
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(
            request_id="r", model="m", prompt=token_ids(prompt), sampling=sampling
        )
        began, took = self._clock.now(), None
        self._core.handle(Submit(self._handles, request))
        while True:
            outputs = [each for each in self._core.step() if isinstance(each, StepOutput)]
            if any(delta.tokens for output in outputs for delta in output.deltas):
                took = self._clock.now() - began
            due = self._core.wake_at()
            if self._core.has_work:
                continue
            if due is None:
                assert took is not None
                return took
            self._clock.advance(max(0.0, due - self._clock.now()))


def _times(groups: int, bandwidth: float) -> tuple[Seconds, Seconds, Bytes]:
    """Time to the first token with the prefix in host memory and on the device, and a block's
    bytes."""
    draw = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(VOCAB - 97) for _ in range(count)]

    worker = _Worker(groups, bandwidth)
    prefix = tokens(CACHED)
    worker.ask(prefix + tokens(REST))
    for _ in range(6):
        worker.ask(tokens(CACHED + REST))
    host, device = (worker.ask(prefix + tokens(REST)) for _ in range(2))
    return host, device, worker.block_bytes


def overlap(groups: int) -> tuple[Seconds, Seconds]:
    """Time to the first token in this many groups, and without overlap, where O = P."""
    _, compute, block_bytes = _times(1, 50e9)
    bandwidth = CACHED // BLOCK * block_bytes / compute
    return _times(groups, bandwidth)[0], _times(1, bandwidth)[0]


def rows() -> list[str]:
    """The rows of the table."""
    found = []
    for groups in (2, 4):
        some, whole = overlap(groups)
        ideal = 0.5 * (1 - 1 / groups)
        found.append(
            f"| {groups} | {whole * 1e3:.1f} | {some * 1e3:.1f} | {1 - some / whole:.1%} "
            f"| {ideal:.1%} |"
        )
    return found
