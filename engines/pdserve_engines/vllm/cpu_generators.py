"""Makes the random numbers of vLLM's workers on CPUs repeatable after a chunk of a prompt.

vLLM draws a number for every sequence of a step, and takes it back for a sequence whose prompt is
not complete. It does so by a generator's offset, which CPU generators do not have, and the error
ends the engine. pdserve gives a seed to every request, so one sampled request with a long prompt
would be enough. Runs in worker processes. Imports no vLLM.
"""

from __future__ import annotations

from typing import Any

__all__ = ["rewind_generators"]

_MOST_DRAWS = 1 << 20
"""More than any sequence has tokens."""


def rewind_generators(worker: Any) -> bool:
    """Run in a worker of vLLM on CPUs: generators made from now on can take a draw back."""
    import torch

    class RewindableGenerator(torch.Generator):
        """Takes the last draw back by drawing all since the last known state again; each is one
        number, and a sequence rarely has a chunk after its first token."""

        def manual_seed(self, seed: int) -> torch.Generator:
            super().manual_seed(seed)
            self._known = self.get_state()
            return self

        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> torch.Generator:
            """vLLM calls it with the offset of one draw less; the number itself says nothing."""
            now, before = self.get_state(), self._known
            self.set_state(before)
            for _ in range(_MOST_DRAWS):
                before = self.get_state()
                torch.randint(0, 2**31, (1,), generator=self)
                if torch.equal(self.get_state(), now):
                    break
            self.set_state(before)
            self._known = before
            return self

    torch.Generator = RewindableGenerator  # type: ignore[misc]
    return True
