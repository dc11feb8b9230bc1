"""What runs in vLLM's worker processes: ties to the engine process, and a repair of its random
numbers on CPUs. Imports no vLLM.

vLLM computes in processes of its own for several devices, and always on CPUs. They must end with
the engine process at once, however it ends: the next engine needs the device's memory. Left alone,
a worker notices the closed pipe only after its current step, and then takes seconds to unwind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

__all__ = ["follow_engine", "rewind_generators"]

_PR_SET_PDEATHSIG = 1
_MOST_DRAWS = 1 << 20
"""More than any sequence has tokens."""


def follow_engine(worker: Any, engine: int) -> bool:
    """Run in a worker of vLLM, in its main thread: from now on it is killed when its parent, the
    process `engine`, ends, and signals to the whole process group leave it alone.

    A terminal's Ctrl-C and a service manager's SIGTERM reach every process, and the node drains
    first. Returns False, with no effect, in a process that the engine has not started: the engine
    process itself, or a worker on another machine.
    """
    if os.getppid() != engine:
        return False
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != engine:  # it has ended meanwhile
            os.kill(os.getpid(), signal.SIGKILL)
    return True


def rewind_generators(worker: Any) -> bool:
    """Run in a worker of vLLM on CPUs: generators made from now on can take a draw back.

    vLLM draws a number for every sequence of a step, and takes it back for a sequence whose prompt
    is not complete. It does so by a generator's offset, which CPU generators do not have, and the
    error ends the engine. pdserve gives a seed to every request, so one sampled request with a long
    prompt would be enough.
    """
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
