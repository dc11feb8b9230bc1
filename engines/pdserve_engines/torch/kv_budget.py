"""Computes how many bytes KV may take on a device: the free memory less what a step needs.

Memory is measured once for all cores of a process, when the weights are loaded and no pool is
allocated: each core then takes its share of the same number. Nothing is allocated here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pdserve.errors import ConfigError
from pdserve.limits.memory import available
from pdserve.limits.sizes import approximate_size
from pdserve_engines.torch.models.attention import GATHERED
from pdserve_engines.torch.models.attention_sinks import WIDER
from pdserve_engines.torch.models.capped_attention import SCORES_AT_ONCE

if TYPE_CHECKING:
    from pdserve.engine_core.executor import KvBlockShape
    from pdserve.ids import Bytes
    from pdserve.messages.engine import EngineSpec
    from pdserve_engines.torch.model_loader.config import ModelConfig

__all__ = [
    "CUDA_CONTEXT",
    "AvailableMemory",
    "KvBudget",
    "StepMemory",
    "measure_memory",
    "out_of_memory",
    "plan_kv",
    "step_memory",
]

_HOST_SHARE = 0.25
"""Share of a host's free memory for KV without --kv-memory; other programs run there, too."""
_HOST_MOST = 0.9
"""Most of a host's free memory that --kv-memory may take; the rest is for steps and the rest of the
process."""
CUDA_CONTEXT: Bytes = 512 << 20
"""Bytes that a process takes of a GPU beside its tensors: the context, and modules loaded late."""
_CAPPED_SCORE: Bytes = 4 * 4
"""Bytes of one score in `capped_attention.py`: float32 before and after softmax, and `dtype`s."""
_FRAGMENTS: Bytes = 512 << 20
"""Bytes lost to fragmentation in torch's allocator and to cuBLAS's workspace."""
_HEAD_ROOM: Bytes = 256 << 20
_HEAD_ROOM_SHARE = 0.25
"""What is kept beside a step that was measured: bytes, and a share of the step. Other mixtures of
chunks leave other fragments, and CUDA graphs keep what a step of up to 512 tokens takes."""


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Memory of a device for KV and steps, once the weights are loaded."""

    free: Bytes
    limit: str
    """What limits the memory, in words."""
    total: Bytes = 0
    """Bytes of the GPU; 0: this is host memory."""
    own: Bytes = 0
    """Bytes of the GPU that this process has taken."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Upper bounds of a step's temporary memory, by what they depend on."""

    fixed: Bytes
    """Bytes of activations and logits."""
    per_position: Bytes
    """Bytes for each position of the longest context: attention masks."""
    of_pool: float
    """Bytes for each byte of the pool: keys and values of one layer, gathered."""

    def measured(self, trial: Bytes | None) -> StepMemory:
        """The same with what the largest step took, when it was computed, in place of `fixed`; what
        grows with contexts and the pool is still an estimate. None: it was not computed."""
        if trial is None:
            return self
        return replace(self, fixed=int(trial * (1 + _HEAD_ROOM_SHARE)) + _HEAD_ROOM)


@dataclass(frozen=True, slots=True)
class KvBudget:
    """Bytes of KV for all cores that share the memory, like `--kv-memory`."""

    proposed: Bytes
    """Size without `--kv-memory`."""
    most: Bytes
    """Largest size that `--kv-memory` may set."""
    reason: str
    """How the two were computed, in words."""


def measure_memory(device: torch.device) -> AvailableMemory:
    """Measure the memory of `device` now."""
    if device.type != "cuda":
        bound = available()
        return AvailableMemory(bound.free, bound.name)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device) + CUDA_CONTEXT
    return AvailableMemory(free, str(device), total, own)


def plan_kv(
    room: AvailableMemory,
    spec: EngineSpec,
    layout: KvBlockShape,
    max_model_len: int,
    needs: StepMemory,
) -> KvBudget:
    """Compute the KV budget: never more than is free, nor more than could ever be used.

    A host gives a quarter of its free memory. A GPU gives what `--gpu-memory-utilization` leaves of
    its total after the weights and the largest step of every core that shares it.
    """
    one = -(-max_model_len // layout.block_size) * layout.block_bytes
    useful = int(one * spec.max_sequences / spec.kv_share)
    if not room.total:
        free = f"{approximate_size(room.free)} that are free ({room.limit})"
        proposed, most = int(room.free * _HOST_SHARE), int(room.free * _HOST_MOST)
        return KvBudget(min(proposed, useful), most, f"of the {free}")
    allowed = int(room.total * spec.gpu_memory_utilization) - room.own

    def fits(whole: Bytes) -> Bytes:
        pool = fit(int(whole * spec.kv_share), layout, max_model_len, needs)
        return int(pool / spec.kv_share)

    proposed, most = fits(max(0, min(allowed, room.free))), fits(room.free)
    kept = approximate_size(int((room.free - most) * spec.kv_share))
    reason = (
        f"of the {approximate_size(room.free)} of {approximate_size(room.total)} that are free on "
        f"{room.limit}, {kept} are kept for a step"
    )
    if not proposed:
        reason += f"; {_missing(allowed, room, spec, needs.fixed + layout.block_bytes)}"
    return KvBudget(min(proposed, useful), most, reason)


def _missing(allowed: Bytes, room: AvailableMemory, spec: EngineSpec, least: Bytes) -> str:
    """How much memory is missing for a step and one block, and which option gives it."""
    least = int(least / spec.kv_share)
    share = (room.own + least) / room.total
    if room.free >= least and share <= 1:
        return (
            f"--gpu-memory-utilization {spec.gpu_memory_utilization:g} leaves "
            f"{approximate_size(max(0, allowed))} of them: give at least {share + 0.005:.2f}"
        )
    return (
        f"{approximate_size(least - min(allowed, room.free))} are missing for a step and a block: "
        "lower --max-batch-tokens or --max-sequences"
    )


def step_memory(
    spec: EngineSpec, config: ModelConfig, itemsize: int, kv_itemsize: int
) -> StepMemory:
    """Estimate how much the largest step of torch's kernels allocates. Counted are:
    `torch_model.py` (activations of one layer, rotary embedding in float32), `attention.py`
    (boolean masks of every window, the bias that attention makes of one; keys and values of a
    layer, gathered and padded up to twice) and `sampler.py` (logits in the weights' dtype and
    float32, probabilities, a sorted copy with its indices, a sum in float64). It is an upper
    estimate, since the peaks do not all coincide."""
    tokens, heads = spec.max_batch_tokens, config.num_heads + config.kv_heads
    inner = config.intermediate_size
    if config.experts is not None:
        inner = max(inner, config.experts.intermediate_size * config.experts.per_token)
    activations = itemsize * (4 * config.hidden_size + 3 * inner)
    activations += (itemsize + 3 * 4) * heads * config.head_dim
    logits = (itemsize + 3 * 4 + 2 * 8) * config.vocab_size
    windows = len({config.window(layer) for layer in range(config.num_layers)})
    of_pool = GATHERED / config.num_layers
    if kv_itemsize != itemsize:
        # What is gathered is widened, too.
        of_pool *= 1 + itemsize / kv_itemsize
    scores = 0
    if config.attention_cap is not None:
        scores = SCORES_AT_ONCE * _CAPPED_SCORE
        of_pool *= 1 + _CAPPED_SCORE / (2 * config.head_dim * itemsize)
    if config.sinks:
        of_pool *= 2 + WIDER / config.head_dim
    return StepMemory(
        fixed=tokens * activations + spec.max_sequences * logits + scores + _FRAGMENTS,
        per_position=tokens * config.groups * (windows + itemsize),
        of_pool=of_pool,
    )


def fit(memory: Bytes, layout: KvBlockShape, max_model_len: int, needs: StepMemory) -> Bytes:
    """The largest pool that leaves memory for a step. Contexts may be as long as the pool allows,
    up to `max_model_len`, and masks grow with them."""
    rest = memory - needs.fixed
    token = layout.block_bytes / layout.block_size * (1 + needs.of_pool)
    tokens = rest / (token + needs.per_position)
    if tokens > max_model_len:
        tokens = (rest - needs.per_position * max_model_len) / token
    return max(0, int(tokens) // layout.block_size) * layout.block_bytes


def out_of_memory(what: str, wanted: Bytes, device: torch.device) -> ConfigError:
    """The error for an allocation that failed."""
    room = f"{device} has no room for {approximate_size(wanted)} of {what}"
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        room += f": {approximate_size(free)} of {approximate_size(total)} are free"
        shared = ", or divide the GPU among its workers with --gpu-memory-utilization"
    else:
        bound = available()
        room += f": {approximate_size(bound.free)} are free ({bound.name})"
        shared = ""
    if what == "weights":
        return ConfigError(f"{room}; take a smaller model or --dtype bfloat16{shared}")
    return ConfigError(f"{room}; lower --kv-memory or --max-model-len{shared}")
