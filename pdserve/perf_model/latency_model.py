"""Models the latency of a prefill and of a decode step on a worker of speed 1.

    prefill(L, c) = base + per_token * (L - c) + per_pair * (L**2 - c**2)     of L tokens, c cached
    step(n, kv)   = step_base + step_sequence * n + step_token * kv   n sequences, kv tokens in all

The form of the first is that of attention: each new token costs the same in the linear layers and
meets all tokens before it. The second is a batch that reads the weights once and all its KV
(DistServe, OSDI'24, fits the same two shapes). `regression` learns the coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["LatencyModel"]


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Non-negative coefficients, in seconds. The defaults are those of a slow GPU: a worker that
    turns out faster is underestimated at first, which spreads the load until it is known."""

    base: Seconds = 0.02
    per_token: Seconds = 1e-4
    per_pair: Seconds = 1e-9
    step_base: Seconds = 0.02
    step_sequence: Seconds = 1e-4
    step_token: Seconds = 1e-7
    fitted: bool = False
    """Whether the coefficients come from observations and predict them well enough."""
    blind: bool = False
    """Whether even the number of uncached tokens does not predict the time; never with `fitted`."""

    def prefill(self, length: int, cached: int = 0) -> Seconds:
        """Seconds to prefill a prompt of `length` tokens, `cached` of which need no computing."""
        pairs = length * length - cached * cached
        return self.base + self.per_token * (length - cached) + self.per_pair * pairs

    def step(self, sequences: int, kv_tokens: int) -> Seconds:
        """Seconds of one decode step."""
        return self.step_base + self.step_sequence * sequences + self.step_token * kv_tokens
