"""Turns an `EngineSpec` into the arguments of TensorRT-LLM's `LLM`. Imports no TensorRT-LLM.

`TorchLlmArgs`, which checks these arguments, refuses fields that it does not have, and releases
differ in their fields. So the caller passes the fields of the installed release. A field that
pdserve sets and the release lacks is left out if it is optional; otherwise it is an error. Every
`--engine-option` is a field of `TorchLlmArgs`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError
from pdserve_engines.engine_options import parse_value, set_by_pdserve

if TYPE_CHECKING:
    from collections.abc import Collection

    from pdserve.messages.engine import EngineSpec

__all__ = ["MINIMUM", "OURS", "LlmArguments", "Schema", "llm_arguments"]

Schema = Mapping[str, Any]
"""The fields of an argument model by their names. The value is another `Schema` if the field is a
model itself, the `frozenset` of its values if it is an enum, and None otherwise."""

OURS = {
    "model": "--model",
    "tokenizer": "--model",
    "skip_tokenizer_init": "nothing: grammars need the tokenizer",
    "dtype": "--dtype",
    "max_seq_len": "--max-model-len",
    "max_batch_size": "--max-sequences",
    "max_num_tokens": "--max-batch-tokens",
    "max_beam_width": "nothing: pdserve has no beam search",
    "guided_decoding_backend": "nothing: grammars are written for llguidance",
    "enable_iter_perf_stats": "nothing: pdserve reads the statistics",
    "cache_transceiver_config.backend": "--transfer-backend",
    "backend": "nothing: the adapter drives the PyTorch backend",
    "kv_cache_config.tokens_per_block": "--block-size",
    "kv_cache_config.enable_block_reuse": "--no-prefix-cache",
    "kv_cache_config.max_gpu_total_bytes": "--kv-memory",
    "kv_cache_config.event_buffer_max_size": "nothing: KV events go to pdserve's routers",
}
"""Fields that pdserve sets, so that no option may: what sets each, or `nothing` and the reason."""

MINIMUM = {
    "model": True,
    "dtype": True,
    "max_seq_len": True,
    "max_batch_size": True,
    "max_num_tokens": True,
    "kv_cache_config": True,
    "kv_cache_config.tokens_per_block": True,
    "kv_cache_config.enable_block_reuse": True,
    "kv_cache_config.free_gpu_memory_fraction": False,
    "kv_cache_config.max_gpu_total_bytes": False,
    "kv_cache_config.event_buffer_max_size": False,
    "enable_chunked_prefill": False,
    "guided_decoding_backend": False,
    "enable_iter_perf_stats": False,
    "scheduler_config.waiting_queue_policy": False,
    "cache_transceiver_config": True,
    "cache_transceiver_config.backend": True,
}
"""The fields that pdserve sets. True: a release without the field is refused. False: the field is
left out then, and the log says what is lost."""

EVENT_BUFFER = 1 << 16
"""Most KV events that TensorRT-LLM keeps until pdserve reads them. If all blocks of a pool change
during one long step, that is fewer events, so none is lost. An entry is small."""


@dataclass(frozen=True, slots=True)
class LlmArguments:
    """The arguments, and the fields that the installed release lacks."""

    values: dict[str, Any]
    missing: tuple[str, ...] = field(default=())
    """Optional fields that pdserve would set."""

    def has(self, path: str) -> bool:
        """Return whether a field, or a field of a nested model (`outer.inner`), is set."""
        outer, _, inner = path.partition(".")
        value = self.values.get(outer)
        return outer in self.values if not inner else isinstance(value, dict) and inner in value


def llm_arguments(spec: EngineSpec, max_model_len: int, schema: Schema) -> LlmArguments:
    """The arguments for `LLM`. `schema`: the fields of the installed release's `TorchLlmArgs`.

    Raises `ConfigError` for an option that the release does not have or that pdserve sets itself,
    and if the release lacks a field without which pdserve cannot work.
    """
    values: dict[str, Any] = {}
    missing = []
    for path, value in _wanted(spec, max_model_len).items():
        if _takes(schema, path, value):
            _set(values, path, value)
        elif MINIMUM[path]:
            raise ConfigError(
                f"this release of TensorRT-LLM has no setting {path!r}, which pdserve needs; "
                "install one that pdserve knows (docs/engines.md)"
            )
        else:
            missing.append(path)
    for name, text in spec.options.items():
        _add_option(values, name, parse_value(text), schema)
    return LlmArguments(values, tuple(missing))


def _wanted(spec: EngineSpec, max_model_len: int) -> dict[str, Any]:
    wanted: dict[str, Any] = {
        "model": spec.model,
        "dtype": spec.dtype,
        "max_seq_len": max_model_len,
        "max_batch_size": spec.max_sequences,
        "max_num_tokens": spec.max_batch_tokens,
        # Otherwise a prompt longer than max_num_tokens is refused.
        "enable_chunked_prefill": True,
        "kv_cache_config.tokens_per_block": spec.block_size,
        "kv_cache_config.enable_block_reuse": spec.prefix_cache,
        "guided_decoding_backend": "llguidance",
        "enable_iter_perf_stats": True,
        "scheduler_config.waiting_queue_policy": "priority",
    }
    if spec.kv_memory:
        wanted["kv_cache_config.max_gpu_total_bytes"] = spec.kv_memory
    else:
        share = spec.gpu_memory_utilization * spec.kv_share
        wanted["kv_cache_config.free_gpu_memory_fraction"] = share
    if spec.prefix_cache:
        wanted["kv_cache_config.event_buffer_max_size"] = EVENT_BUFFER
    if spec.transfer is not None:
        wanted["cache_transceiver_config.backend"] = "DEFAULT"
    return wanted


def _accepts(schema: Schema, path: str) -> bool:
    outer, _, inner = path.partition(".")
    if outer not in schema:
        return False
    return not inner or (isinstance(schema[outer], Mapping) and inner in schema[outer])


def _takes(schema: Schema, path: str, value: Any) -> bool:
    """True if the release has the field and, if the field is an enum, this value."""
    if not _accepts(schema, path):
        return False
    outer, _, inner = path.partition(".")
    kind = schema[outer][inner] if inner else schema[outer]
    return not isinstance(kind, frozenset) or value in kind


def _set(values: dict[str, Any], path: str, value: Any) -> None:
    outer, _, inner = path.partition(".")
    if inner:
        values.setdefault(outer, {})[inner] = value
    else:
        values[outer] = value


def _add_option(values: dict[str, Any], name: str, value: Any, schema: Schema) -> None:
    """Add an option. An object is merged into what pdserve sets in the same model."""
    field_name = name.replace("-", "_")
    if isinstance(value, dict) and isinstance(schema.get(field_name), Mapping):
        for key, inner in value.items():
            _set(values, _checked(f"{field_name}.{key}", schema), inner)
    else:
        _set(values, _checked(field_name, schema), value)


def _checked(path: str, schema: Schema) -> str:
    if path in OURS:
        raise set_by_pdserve("tensorrt_llm", path, OURS[path])
    if _accepts(schema, path):
        return path
    outer, _, inner = path.partition(".")
    known: Collection[str] = schema
    if inner:
        known = [f"{outer}.{name}" for name in schema[outer]]
    close = difflib.get_close_matches(path, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    raise ConfigError(
        f"the tensorrt_llm engine has no option {path!r}{hint} Options are the fields of its "
        'TorchLlmArgs, such as tensor_parallel_size, or kv_cache_config=\'{"dtype": "fp8"}\''
    )
