"""Ties vLLM's worker processes to the engine process. Imports no vLLM.

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

__all__ = ["follow_engine"]

_PR_SET_PDEATHSIG = 1


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
