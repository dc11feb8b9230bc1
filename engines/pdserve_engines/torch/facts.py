"""What a loaded model tells the scheduler and its peers: the `ModelInfo` of the executor port."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pdserve.engine.executor import KvLayout, ModelInfo
from pdserve.engine.guide import guided_features
from pdserve_engines.torch.host import available_memory

if TYPE_CHECKING:
    from pdserve.messages.engine import EngineSpec
    from pdserve_engines.torch.config import ModelConfig
    from pdserve_engines.torch.settings import Settings

KV_FORMAT = 1
"""Raised whenever equal models of two releases would no longer understand each other's blocks."""


def model_info(
    spec: EngineSpec, config: ModelConfig, settings: Settings, weight_bytes: int, identity: bytes
) -> ModelInfo:
    """`identity` tells checkpoints apart, see `Checkpoint.identity`."""
    layout = KvLayout(
        num_layers=config.num_layers,
        kv_heads=config.kv_heads,
        block_size=spec.block_size,
        head_dim=config.head_dim,
        itemsize=settings.dtype.itemsize,
    )
    dtype = str(settings.dtype).removeprefix("torch.")
    return ModelInfo(
        model_type=config.family,
        dtype=dtype,
        device=str(settings.device),
        vocab_size=config.vocab_size,
        max_model_len=settings.max_model_len,
        eos_token_ids=config.eos_token_ids,
        layout=layout,
        weight_bytes=weight_bytes,
        kv_memory=propose_kv_memory(
            layout, settings.max_model_len, spec.max_sequences, free_memory(settings.device)
        ),
        compat_hash=compat_hash(config, layout, dtype, identity),
        embedding_size=config.hidden_size,
        generates=not config.headless,
        features=("bans", *guided_features(Path(spec.model))),
    )


def free_memory(device: torch.device) -> int:
    """Bytes of `device` that KV may take.

    A quarter of a CPU host's free memory, because the host is shared; nine tenths of a GPU's,
    because what remains is all that a step's temporaries need.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.9)
    return available_memory() // 4


def propose_kv_memory(layout: KvLayout, max_model_len: int, max_sequences: int, free: int) -> int:
    """Bytes for KV when nobody says: `free`, but no more than could ever be used, and never less
    than one sequence of full length takes."""
    one = -(-max_model_len // layout.block_size) * layout.block_bytes
    return max(min(free, one * max_sequences), one)


def compat_hash(config: ModelConfig, layout: KvLayout, dtype: str, identity: bytes) -> str:
    """Equal exactly for workers whose blocks are interchangeable; limits and ends do not matter.

    What is at its default is left out, so that a new field separates only models that use it from
    the same models of an older release.
    """
    facts = asdict(config)
    for irrelevant in ("max_positions", "dtype", "eos_token_ids"):
        del facts[irrelevant]
    for field in fields(config):
        if facts.get(field.name, field) == field.default:
            del facts[field.name]
    if config.rope.yarn is None:
        del facts["rope"]["yarn"]
    text = repr((KV_FORMAT, sorted(facts.items()), asdict(layout), dtype)).encode()
    return hashlib.sha256(text + identity).hexdigest()[:32]
