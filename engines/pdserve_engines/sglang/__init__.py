"""The SGLang engine (`--engine=sglang`): SGLang's engine, driven in pdserve's engine process.

`options` makes SGLang's arguments of an `EngineSpec`, `params` its requests, `choices` our output
of its chunks, `events` our KV events of its own, `event_feed` gets those from its sockets, and
`core` drives it through `engine`. SGLang is imported only when an engine loads.
"""

from __future__ import annotations

import importlib.util

from pdserve.clock import SystemClock
from pdserve.engine_core.support import EngineSupport
from pdserve_engines.sglang.core import SglangCore

__all__ = ["SUPPORT", "SglangCore", "create", "missing"]

SUPPORT = EngineSupport(
    features=("grammar", "lora"),
    exact="greedy requests",
    prompt_logprobs="yes",
    kv_events="yes",
    devices="GPUs, several GPUs and nodes",
)


def create() -> SglangCore:
    """The entry point's factory; the core schedules by itself."""
    return SglangCore(SystemClock())


def missing() -> list[str]:
    """What this machine lacks to run the engine, in words; empty: nothing."""
    if importlib.util.find_spec("sglang") is None:
        return ["the package sglang: pip install 'pdserve[sglang]'"]
    return []
