"""Turns an `EngineSpec` into the arguments of vLLM's `EngineArgs`. Imports no vLLM.

Every `--engine-option` is a field of `EngineArgs`, so models, quantisations and parallel layouts
that pdserve does not know work as in `vllm serve`. Fields that pdserve sets itself are refused with
the flag that sets them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError
from pdserve_engines.engine_options import field_of, parse_value

if TYPE_CHECKING:
    from collections.abc import Collection

    from pdserve.ids import Bytes
    from pdserve.messages.engine import EngineSpec

__all__ = ["OURS", "engine_arguments", "rank_for"]

_FIELDS = "vLLM's EngineArgs, such as tensor_parallel_size, quantization or enforce_eager"

OURS = {
    "model": "--model",
    "served_model_name": "--served-model-name",
    "dtype": "--dtype",
    "seed": "the field seed of a request",
    "max_model_len": "--max-model-len",
    "block_size": "--block-size",
    "enable_prefix_caching": "--no-prefix-cache",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "kv_cache_memory_bytes": "--kv-memory",
    "max_num_batched_tokens": "--max-batch-tokens",
    "max_num_seqs": "--max-sequences",
    "kv_events_config": "nothing: KV events go to pdserve's routers",
    "kv_transfer_config": "--transfer and --mode",
    "enable_lora": "--lora",
    "structured_outputs_config": "nothing: pdserve computes grammars itself",
    "reasoning_parser": "--reasoning-parser",
    "skip_tokenizer_init": "nothing: pdserve's frontend has the tokenizer",
    "scheduling_policy": "nothing: requests have priorities",
    "disable_log_stats": "nothing: pdserve reads the statistics",
    "data_parallel_size": "more workers: each pdserve worker is one replica",
}
"""Fields that pdserve sets -> what to use instead of the option."""

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `max_lora_rank` that vLLM takes."""


def engine_arguments(spec: EngineSpec, fields: Collection[str], kv_memory: Bytes) -> dict[str, Any]:
    """Arguments for `EngineArgs`, which has these `fields`; `kv_memory` 0 leaves it to vLLM.

    Raises `ConfigError` for an option that vLLM does not have, or that a flag of pdserve sets.
    """
    arguments: dict[str, Any] = {
        "model": spec.model,
        "dtype": spec.dtype,
        "seed": spec.seed,
        "block_size": spec.block_size,
        "enable_prefix_caching": spec.prefix_cache,
        "max_num_batched_tokens": spec.max_batch_tokens,
        "max_num_seqs": spec.max_sequences,
        "scheduling_policy": "priority",
        # Requests may ask for the logprobs of as many alternatives as the API allows.
        "max_logprobs": -1,
        "disable_log_stats": False,
        "gpu_memory_utilization": spec.gpu_memory_utilization * spec.kv_share,
    }
    if spec.max_model_len:
        arguments["max_model_len"] = spec.max_model_len
    if kv_memory:
        arguments["kv_cache_memory_bytes"] = kv_memory
    if spec.loras:
        arguments |= _lora_arguments(spec)
    for name, text in spec.options.items():
        arguments[field_of("vllm", name, fields, OURS, _FIELDS)] = parse_value(text)
    return arguments


def _lora_arguments(spec: EngineSpec) -> dict[str, Any]:
    return {
        "enable_lora": True,
        # vLLM's kernels on CPUs give sequences without an adapter the one in the last place, so
        # that place stays empty.
        "max_loras": len(spec.loras) + 1,
        "max_lora_rank": rank_for(max(adapter.rank for adapter in spec.loras)),
    }


def rank_for(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM that holds adapters of `rank`; 0 means unknown.

    Raises `ConfigError` if there is none."""
    wanted = rank or 16
    for most in _RANKS:
        if most >= wanted:
            return most
    raise ConfigError(f"an adapter of rank {rank} is larger than vLLM's limit of {_RANKS[-1]}")
