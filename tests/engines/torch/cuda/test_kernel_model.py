"""The whole forward pass with kernels, against the same model in torch operations."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pdserve.engine_core.executor import KvBlockShape, ScheduledChunk
from pdserve_engines.torch.cuda import (
    decode_attention,
    decode_plan,
    kernel_model,
    step_attention,
)
from pdserve_engines.torch.cuda.kernel_model import KernelModel
from pdserve_engines.torch.cuda.support import unsupported_reason
from pdserve_engines.torch.fp8_kv import FP8
from pdserve_engines.torch.kv_pool import KvPool
from pdserve_engines.torch.model_loader.config import ModelConfig, parse_config
from pdserve_engines.torch.model_loader.weights import params
from pdserve_engines.torch.models.forward_batch import make_batch
from pdserve_engines.torch.models.torch_model import TorchModel
from pdserve_engines.torch.settings import TorchSettings
from tests.engines.torch.driver import sequence

if TYPE_CHECKING:
    from pdserve_engines.torch.model_loader.kv_scales import KvScales

BLOCK = 16
SEGMENT = 64
"""Shorter than in service: the interpreter takes seconds for some hundred tokens."""
VOCAB = 97
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 600,
    "head_dim": 24,
    "attention_bias": True,
    "mlp_bias": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3_windowed": LLAMA
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 45,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": LLAMA
    | {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gemma2": LLAMA
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": 45,
        "query_pre_attn_scalar": 60,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 9.0,
    },
    "gemma3": LLAMA
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 45,
        "sliding_window_pattern": 2,
    },
    "granite": LLAMA
    | {
        "architectures": ["GraniteForCausalLM"],
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.0,
    },
    "smollm3": LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]},
    "ministral": LLAMA
    | {
        "architectures": ["Ministral3ForCausalLM"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 150,
            "llama_4_scaling_beta": 0.5,
        },
    },
}


class Side:
    """A model with a pool of its own, in which free places are NaN."""

    def __init__(
        self,
        model: TorchModel,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        scales: KvScales = (),
    ) -> None:
        size = dtype.itemsize
        layout = KvBlockShape(config.num_layers, config.kv_heads, BLOCK, config.head_dim, size)
        generator = torch.Generator().manual_seed(1)
        for param in params(config):
            parts = []
            for name, shape in param.parts:
                part = torch.randn(shape, generator=generator) * 0.1
                parts.append(part + 1 if "norm" in name and not config.float_norms else part)
            model.place(param, parts)
        self.model, self.pool = model, KvPool(layout, 40, dtype, device, scales)
        self.pool.tensor.fill_(torch.nan)
        model.bind(self.pool)

    def steps(self) -> list[torch.Tensor]:
        """Logits of prompts, of a step with prompts and decoding sequences, and of one that only
        decodes; then the KV of their blocks."""
        ids = list(range(40))
        random.Random(0).shuffle(ids)
        long, short, late = ids[:20], ids[20:23], ids[23:26]
        plans: list[tuple[list[ScheduledChunk], list[int]]] = [
            ([chunk(SEGMENT + 9, 0, long, 0), chunk(9, 0, short, 1)], [5, SEGMENT + 8]),
            (
                [
                    chunk(SEGMENT + 10, SEGMENT + 9, long, 0),
                    chunk(5, 0, late, 2),
                    chunk(10, 9, short, 1),
                ],
                [0, 5, 6],
            ),
            (
                [
                    chunk(11, 10, short, 1),
                    chunk(6, 5, late, 2),
                    chunk(SEGMENT + 11, SEGMENT + 10, long, 0),
                ],
                [0, 1, 2],
            ),
        ]
        found = []
        with torch.inference_mode():
            for chunks, rows in plans:
                hidden = self.model.forward(make_batch(chunks, rows, BLOCK))
                found.append(self.model.logits(hidden))
        return [*found, self.pool.tensor[long[: SEGMENT // BLOCK]]]

    def close(self) -> None:
        self.model.close()
        self.pool.close()


def chunk(end: int, start: int, blocks: list[int], seed: int) -> ScheduledChunk:
    made = sequence(random.Random(seed).choices(range(VOCAB), k=SEGMENT + 20)[:end])
    made.blocks = blocks
    return ScheduledChunk(made, start, end - start, samples=True)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(pytest.param(each, marks=pytest.mark.long) for each in list(FAMILIES)[1:]),
    ],
)
def test_steps_are_those_of_torch(
    device: torch.device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_plan, "SEGMENT", SEGMENT)
    monkeypatch.setattr(decode_attention, "SEGMENT", SEGMENT)
    config = parse_config(FAMILIES[name])
    assert unsupported_reason(config) is None
    settings = TorchSettings(device, torch.float32, 1, 600)
    kernels = Side(KernelModel(config, settings), config, device)
    plain = Side(TorchModel(config, settings), config, device)
    for found, expected in zip(kernels.steps(), plain.steps(), strict=True):
        assert not expected.isnan().any()
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    kernels.close()
    plain.close()


def test_each_layer_of_an_fp8_pool_has_its_own_scales(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they do is tested with the kernels: Triton's interpreter rounds to FP8 wrongly."""
    stored: list[object] = []
    read: list[object] = []

    def attend(*args: Any) -> None:
        args[1].zero_()
        read.append(args[-1].kv_scales)

    monkeypatch.setattr(kernel_model, "rotate_store", lambda *args: stored.append(args[-1]))
    monkeypatch.setattr(step_attention, "attend_decodes", attend)
    config, scales = parse_config(LLAMA), ((0.5, 2.0), (3.0, 0.25))
    settings = TorchSettings(device, torch.float32, 1, 600, kv_cache_dtype="fp8_e4m3")
    side = Side(KernelModel(config, settings), config, device, FP8, scales)
    with torch.inference_mode():
        side.model.forward(make_batch([chunk(5, 4, [3], 0)], [0], BLOCK))
    assert stored == read == list(scales)
    side.close()
