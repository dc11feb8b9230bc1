"""Measures how long prompts take on an idle worker with an empty cache, by running the engine."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.clock import ManualClock
from pdserve.engine_core.engine_loader import load_core
from pdserve.messages.engine import StepOutput, Submit
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.token_ids import token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.engine_core.kit import Core
    from pdserve.ids import Seconds
    from pdserve.messages.engine import EngineSpec

__all__ = ["LengthTimes", "cold_ttft_by_length", "measured_lengths"]

_PER_OCTAVE: Final = 4
"""Lengths that are measured; between them times are nearly linear."""
_FIRST: Final = 16
_MOST_STEPS: Final = 100_000


@dataclass(frozen=True, slots=True)
class LengthTimes:
    """Times by prompt length: measured at some lengths, interpolated between them."""

    lengths: Sequence[int]
    """Ascending."""
    times: Sequence[Seconds]

    def __call__(self, length: int) -> Seconds:
        lengths, times = self.lengths, self.times
        right = min(max(1, bisect_left(lengths, length)), len(lengths) - 1)
        if right == 0:
            return times[0]
        a, b = lengths[right - 1], lengths[right]
        share = (length - a) / (b - a)
        return max(0.0, times[right - 1] + share * (times[right] - times[right - 1]))


def measured_lengths(longest: int, per_octave: int = _PER_OCTAVE) -> list[int]:
    """The lengths to measure, so that `longest` is the last one."""
    lengths = [_FIRST]
    while lengths[-1] < longest:
        lengths.append(min(longest, int(lengths[-1] * 2 ** (1 / per_octave)) + 1))
    return lengths


def cold_ttft_by_length(spec: EngineSpec, longest: int) -> LengthTimes:
    """Seconds to the first token by prompt length, up to `longest`; `spec` should have no noise."""
    lengths = measured_lengths(longest)
    clock = ManualClock()
    core = load_core(spec.engine, clock)
    # Without a prefix cache every prompt is cold.
    core.load(replace(spec, prefix_cache=False), lambda progress: None)
    times = [_measure(core, clock, number, length) for number, length in enumerate(lengths, 1)]
    core.close()
    return LengthTimes(lengths, times)


def _measure(core: Core, clock: ManualClock, number: int, length: int) -> Seconds:
    request = GenerateRequest(
        request_id=str(number),
        model="",
        prompt=token_ids([17] * length),
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
    )
    core.handle(Submit(handle=number, request=request))
    begin = clock.now()
    for _ in range(_MOST_STEPS):
        for event in core.step():
            if isinstance(event, StepOutput):
                return clock.now() - begin
        due = core.wake_at()
        if not core.has_work and due is not None:
            clock.advance(max(0.0, due - clock.now()))
    raise RuntimeError(f"the engine does not answer a prompt of {length} tokens")
