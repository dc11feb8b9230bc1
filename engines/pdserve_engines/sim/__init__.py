"""The sim engine (`--engine=sim`): pdserve's scheduler and KV pool, with a timing model.

`settings` has its options, `perf_model.step_time` the workers it can simulate; docs/simulation.md
says what it is good for.
"""

from __future__ import annotations

from pdserve.engine_core.support import EngineSupport
from pdserve_engines.sim.core import SimCore
from pdserve_engines.sim.executor import SimExecutor

__all__ = ["SUPPORT", "SimCore", "SimExecutor", "create"]

SUPPORT = EngineSupport(
    features=("grammar", "thinking", "lora", "embeddings"),
    exact="all requests",
    logprobs="made up",
    prompt_logprobs="made up",
    kv_events="yes",
    disaggregation="pdserve's transfers, with option content=on",
    devices="none",
)


def create() -> SimExecutor:
    """The entry point's factory; the executor brings a core of its own."""
    return SimExecutor()
