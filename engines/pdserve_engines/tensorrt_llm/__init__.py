"""The TensorRT-LLM engine (`--engine=tensorrt_llm`): its `LLM`, driven in pdserve's engine process.

`options` makes its arguments of an `EngineSpec`, `params` its requests, `outputs` our records of
its results, `events` our KV events of its own; `requests` runs what it computes, `core` is the
engine, and `peers` the engine that hands prompts over (`handoff`). tensorrt_llm is imported only
when an engine loads (`package`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.engine_core.support import EngineSupport
from pdserve_engines.tensorrt_llm.core import TensorRtLlmCore
from pdserve_engines.tensorrt_llm.package import load_package, missing
from pdserve_engines.tensorrt_llm.peers import PeerCore

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.clock import Clock
    from pdserve_engines.tensorrt_llm.package import Package

__all__ = ["SUPPORT", "PeerCore", "TensorRtLlm", "TensorRtLlmCore", "create", "missing"]

SUPPORT = EngineSupport(
    features=("bans", "grammar"),
    exact="greedy requests",
    kv_events="yes",
    disaggregation="its own transceiver",
    devices="GPUs, several GPUs and nodes",
)


class TensorRtLlm:
    """Makes the core, which depends on whether the worker hands prompts over."""

    def __init__(self, load: Callable[[], Package] = load_package) -> None:
        self._load = load

    def make_core(self, clock: Clock, mover: object | None = None) -> TensorRtLlmCore:
        """`mover` is pdserve's own transport: that there is one says that KV is to move, which
        TensorRT-LLM does by itself."""
        kind = TensorRtLlmCore if mover is None else PeerCore
        return kind(clock, self._load)


def create() -> TensorRtLlm:
    """The entry point's factory."""
    return TensorRtLlm()
