"""Turns an `EngineSpec` into the arguments of SGLang's `Engine`. Imports no SGLang.

Every `--engine-option` is a field of SGLang's `ServerArgs`, so models, quantisations and parallel
layouts that pdserve does not know work as in `sglang serve`. Fields that pdserve sets itself are
refused with the flag that sets them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError
from pdserve_engines.engine_options import field_of, parse_value

if TYPE_CHECKING:
    from collections.abc import Collection

    from pdserve.messages.engine import EngineSpec

__all__ = ["OURS", "event_endpoints", "server_arguments"]

_FIELDS = "SGLang's ServerArgs, such as tp_size, quantization or attention_backend"

OURS = {
    "model_path": "--model",
    "served_model_name": "--served-model-name",
    "context_length": "--max-model-len",
    "dtype": "--dtype",
    "page_size": "--block-size",
    "max_running_requests": "--max-sequences",
    "chunked_prefill_size": "--max-batch-tokens",
    "mem_fraction_static": "--gpu-memory-utilization",
    "disable_radix_cache": "--no-prefix-cache",
    "enable_lora": "--lora",
    "lora_paths": "--lora",
    "random_seed": "the field seed of a request",
    "device": "--device",
    "kv_events_config": "nothing: KV events go to pdserve's routers",
    "disaggregation_mode": "nothing: this engine serves prefill and decode together",
    "grammar_backend": "nothing: pdserve's grammars need llguidance",
    "incremental_streaming_output": "nothing: pdserve reads deltas",
    "stream_interval": "nothing: pdserve reads every token",
    "enable_priority_scheduling": "nothing: requests have priorities",
    "schedule_low_priority_values_first": "nothing: the highest priority is first",
    "skip_tokenizer_init": "nothing: grammars and min_tokens need the tokenizer",
    "tokenizer_worker_num": "nothing: pdserve's frontend has the tokenizer",
    "is_embedding": "nothing: this engine makes no embeddings",
    "preferred_sampling_params": "the request's own parameters",
    "max_queued_requests": "--max-waiting",
    "allow_auto_truncate": "nothing: prompts that are too long are refused",
    "dp_size": "more workers: each pdserve worker is one replica",
    "nnodes": "nothing: a worker is on one machine",
    "node_rank": "nothing: a worker is on one machine",
    "host": "nothing: no server is started",
    "port": "nothing: no server is started",
}
"""Fields that pdserve sets, or that must keep their default -> what to use instead."""


def server_arguments(spec: EngineSpec, fields: Collection[str], events: str) -> dict[str, Any]:
    """Arguments for SGLang's `Engine`, whose `ServerArgs` has these `fields`.

    `events` is a folder for the sockets of KV events; empty: none are wanted. Raises `ConfigError`
    for an option that SGLang does not have or that a flag of pdserve sets.
    """
    if spec.kv_memory:
        raise ConfigError(
            "the sglang engine takes no --kv-memory: SGLang sizes its pool by a share of the GPU; "
            "use --gpu-memory-utilization or --engine-option max_total_tokens=N"
        )
    arguments: dict[str, Any] = {
        "model_path": spec.model,
        "dtype": spec.dtype,
        "random_seed": spec.seed,
        "page_size": spec.block_size,
        "max_running_requests": spec.max_sequences,
        "chunked_prefill_size": spec.max_batch_tokens,
        "mem_fraction_static": spec.gpu_memory_utilization * spec.kv_share,
        "disable_radix_cache": not spec.prefix_cache,
        "grammar_backend": "llguidance",
        "incremental_streaming_output": True,
        "stream_interval": 1,
        "enable_priority_scheduling": True,
        "log_level": "warning",
    }
    arguments |= _device_arguments(spec.device)
    if spec.max_model_len:
        arguments["context_length"] = spec.max_model_len
    if spec.loras:
        arguments |= _lora_arguments(spec)
    if events:
        arguments["kv_events_config"] = _events_config(events)
    for name, text in spec.options.items():
        arguments[field_of("sglang", name, fields, OURS, _FIELDS)] = parse_value(text)
    missing = sorted(arguments.keys() - set(fields))
    if missing:
        raise ConfigError(
            f"this release of SGLang has no argument {', '.join(missing)}, which pdserve needs; "
            "install one of the releases that `pdserve doctor` names"
        )
    return arguments


def _device_arguments(device: str) -> dict[str, Any]:
    kind, _, number = device.partition(":")
    if kind == "auto":
        return {}
    return {"device": kind, "base_gpu_id": int(number)} if number else {"device": kind}


def _lora_arguments(spec: EngineSpec) -> dict[str, Any]:
    """An adapter's name in SGLang is its id, so that an adapter with other files is another one."""
    return {
        "enable_lora": True,
        "lora_paths": {adapter.id: adapter.path for adapter in spec.loras},
        # One place more, for requests without an adapter.
        "max_loras_per_batch": len(spec.loras) + 1,
    }


def event_endpoints(folder: str) -> tuple[str, str]:
    """Endpoints of the live events and of the replay."""
    return f"ipc://{folder}/events", f"ipc://{folder}/replay"


def _events_config(folder: str) -> str:
    live, replay = event_endpoints(folder)
    return json.dumps({"publisher": "zmq", "endpoint": live, "replay_endpoint": replay})
