"""Builds the `ModelInfo` of the executor port from a loaded model."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pdserve.engine_core.executor import KvBlockShape, ModelInfo
from pdserve.engine_core.structured_output import structured_output_features
from pdserve_engines.torch.exactness import token_promises
from pdserve_engines.torch.kv_budget import KvBudget, plan_kv, step_memory

if TYPE_CHECKING:
    from pdserve.ids import Bytes
    from pdserve.messages.engine import EngineRank, EngineSpec
    from pdserve_engines.torch.kv_budget import AvailableMemory, StepMemory
    from pdserve_engines.torch.model_loader.config import ModelConfig
    from pdserve_engines.torch.settings import TorchSettings

KV_FORMAT = 1
"""Version of the KV format; raised when equal models of two releases cannot exchange blocks."""


def model_info(
    spec: EngineSpec,
    config: ModelConfig,
    settings: TorchSettings,
    weight_bytes: int,
    identity: bytes,
    room: AvailableMemory,
    exact: str = "",
    *,
    trial: Bytes | None = None,
    num_labels: int = 0,
    slow_kernels: str = "",
    ranks: tuple[EngineRank, ...] = (),
) -> ModelInfo:
    """`identity` tells checkpoints apart (`Checkpoint.identity`); `exact` is the model's,
    `trial` as in `StepMemory.measured`, `num_labels` the classification head's; `slow_kernels` and
    `ranks` as in `EngineCapabilities`."""
    layout = kv_block_shape(spec, config, settings)
    dtype = str(settings.dtype).removeprefix("torch.")
    budget = plan_kv_budget(spec, config, settings, room, trial)
    return ModelInfo(
        model_type=config.family,
        dtype=dtype,
        device=str(settings.device),
        vocab_size=config.vocab_size,
        max_model_len=settings.max_model_len,
        eos_token_ids=config.eos_token_ids,
        layout=layout,
        weight_bytes=weight_bytes,
        kv_memory=budget.proposed,
        compat_hash=compat_hash(
            config.for_context(settings.max_model_len),
            layout,
            dtype,
            identity + kv_format(settings),
        ),
        embedding_size=config.hidden_size,
        generates=not config.headless,
        num_labels=num_labels,
        features=(
            "bans",
            *structured_output_features(Path(spec.model)),
            *token_promises(
                row_kernels=exact,
                dtype=dtype,
                kv_cache_dtype=settings.kv_cache_dtype,
                experts=config.experts is not None,
                ranks=spec.tensor_parallel,
                matmul_precision=torch.get_float32_matmul_precision(),
            ),
        ),
        kv_most=budget.most,
        kv_reason=budget.reason,
        slow_kernels=slow_kernels,
        ranks=ranks,
    )


def kv_block_shape(spec: EngineSpec, config: ModelConfig, settings: TorchSettings) -> KvBlockShape:
    """Shape of one block."""
    return KvBlockShape(
        num_layers=config.num_layers,
        kv_heads=config.kv_heads,
        block_size=spec.block_size,
        head_dim=config.head_dim,
        itemsize=settings.kv_dtype.itemsize,
    )


def plan_kv_budget(
    spec: EngineSpec,
    config: ModelConfig,
    settings: TorchSettings,
    room: AvailableMemory,
    trial: Bytes | None = None,
) -> KvBudget:
    """The KV budget in this available memory; `trial` as in `StepMemory.measured`."""
    needs = step_memory(spec, config, settings.dtype.itemsize, settings.kv_dtype.itemsize)
    needs = needs.measured(trial)
    layout = kv_block_shape(spec, config, settings)
    if room.total and spec.tensor_parallel > 1:
        return _budget_of_ranks(spec, layout, settings.max_model_len, needs, room)
    budget = plan_kv(room, spec, layout, settings.max_model_len, needs)
    copies = max(1, spec.tensor_parallel // config.kv_heads)
    if copies == 1:
        return budget
    reason = f"{budget.reason}, for {copies} copies of each KV head on the ranks"
    return KvBudget(budget.proposed // copies, budget.most // copies, reason)


def _budget_of_ranks(
    spec: EngineSpec,
    layout: KvBlockShape,
    max_model_len: int,
    needs: StepMemory,
    room: AvailableMemory,
) -> KvBudget:
    """The budget of ranks that each have `room` on a GPU: as many blocks of the whole model as one
    rank has room for with its own heads."""
    ranks = spec.tensor_parallel
    held = max(1, layout.kv_heads // ranks)
    one = plan_kv(room, spec, replace(layout, kv_heads=held), max_model_len, needs)
    times = layout.kv_heads // held
    return KvBudget(
        one.proposed * times, one.most * times, f"{one.reason}, on each of {ranks} ranks"
    )


def kv_format(settings: TorchSettings) -> bytes:
    """What a byte of KV means, if that does not follow from the dtype; else empty, as it was before
    there were other formats."""
    if settings.kv_cache_dtype == "auto":
        return b""
    return repr((settings.kv_cache_dtype, settings.kv_scales)).encode()


def compat_hash(config: ModelConfig, layout: KvBlockShape, dtype: str, identity: bytes) -> str:
    """Equal exactly for workers that may exchange blocks; limits and end tokens do not count.

    Fields at their defaults are left out, so that a new field separates only models that use it
    from the same models of an older release.
    """
    facts = asdict(config)
    for irrelevant in ("max_positions", "dtype", "eos_token_ids", "multimodal"):
        del facts[irrelevant]
    for field in fields(config):
        if facts.get(field.name, field) == field.default:
            del facts[field.name]
    _drop_defaults(facts["rope"], *_LATER_ROPE_FIELDS, "yarn")
    _drop_defaults(facts.get("local_rope") or {}, *_LATER_ROPE_FIELDS)
    if config.experts is not None:
        _drop_defaults(facts["experts"], "bias", "swiglu", "storage")
        # Kinds of storage hold the same weights.
        facts["experts"].pop("storage", None)
    text = repr((KV_FORMAT, sorted(facts.items()), asdict(layout), dtype)).encode()
    return hashlib.sha256(text + identity).hexdigest()[:32]


_LATER_ROPE_FIELDS = ("dims", "interleaved", "longrope", "context", "query_beta")
"""Fields of `RopeConfig` that the first release had not."""


def _drop_defaults(rope: dict[str, object], *names: str) -> None:
    for name in names:
        if not rope.get(name):
            rope.pop(name, None)
