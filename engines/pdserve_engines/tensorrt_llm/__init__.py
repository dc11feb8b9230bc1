"""The TensorRT-LLM engine (`--engine=tensorrt_llm`): its `LLM`, driven in pdserve's engine process.

`options` makes its arguments of an `EngineSpec`, `params` its requests, `outputs` our records of
its results, `events` our KV events of its own; `requests` runs what it computes, and `core` is the
engine. tensorrt_llm is imported only when an engine loads (`package`).
"""

from __future__ import annotations

from pdserve.clock import SystemClock
from pdserve_engines.tensorrt_llm.core import TensorRtLlmCore
from pdserve_engines.tensorrt_llm.package import missing

__all__ = ["TensorRtLlmCore", "create", "missing"]


def create() -> TensorRtLlmCore:
    """The entry point's factory; the core schedules by itself."""
    return TensorRtLlmCore(SystemClock())
