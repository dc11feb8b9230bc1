"""The vLLM engine (`--engine=vllm`): vLLM's engine core, driven in pdserve's engine process.

`options` makes vLLM's arguments of an `EngineSpec`, `params` its requests, `image_reader` its
images, `block_names` our KV events of its own, `grammar` constrains its tokens, `choices` makes our
output of its output, and `core` drives it. vLLM is imported only when an engine loads.
"""

from __future__ import annotations

import importlib.util

from pdserve.clock import SystemClock
from pdserve.engine_core.support import EngineSupport
from pdserve_engines.vllm.core import VllmCore

__all__ = ["SUPPORT", "VllmCore", "create", "missing"]

SUPPORT = EngineSupport(
    features=("bans", "grammar", "thinking", "lora", "embeddings", "classify", "nearly", "images"),
    exact="greedy requests",
    prompt_logprobs="yes",
    kv_events="yes",
    disaggregation="pdserve's transfers",
    devices="CPUs, GPUs, several GPUs and nodes",
)
"""Grammars and reasoning budgets are off with speculative decoding; models with latent attention,
state-space layers or windows are not disaggregated; images are with models that see, and are
prefilled where they are decoded."""


def create() -> VllmCore:
    """The entry point's factory; the core schedules by itself."""
    return VllmCore(SystemClock())


def missing() -> list[str]:
    """What this machine lacks to run the engine, in words; empty: nothing."""
    if importlib.util.find_spec("vllm") is None:
        return ["the package vllm: pip install 'pdserve[vllm]'"]
    return []
