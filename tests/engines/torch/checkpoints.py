"""Tiny random checkpoints of every family, and `transformers` as the oracle for them."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from pdserve import accel

# Its progress bars come with a thread that outlives the test.
_logging: Any = transformers.utils.logging
_logging.disable_progress_bar()

VOCAB = 160
POSITIONS = 256

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
}
"""The tests' sequences are longer than the original context."""
WINDOW = 12
"""Shorter than the tests' prompts, and no multiple of a block."""


@dataclass(frozen=True)
class Tiny:
    """One small configuration; `fields` override the common ones."""

    family: str
    fields: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def config(self) -> Any:
        common: dict[str, Any] = {
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "intermediate_size": 72,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": POSITIONS,
            "eos_token_id": 7,
            "bos_token_id": 1,
        }
        suffix = "TextConfig" if self.family == "Gemma3" else "Config"
        return getattr(transformers, self.family + suffix)(**common | self.fields)


TINY = {
    "llama": Tiny("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama_biased": Tiny(
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": LINEAR_ROPE,
            "num_key_value_heads": 1,
        },
    ),
    "qwen2": Tiny("Qwen2", {"tie_word_embeddings": True, "num_attention_heads": 6}),
    "qwen3": Tiny("Qwen3", {"head_dim": 20}),
    "qwen3_biased": Tiny(
        "Qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}
    ),
    "mistral": Tiny("Mistral", {"head_dim": 24, "num_key_value_heads": 4, "sliding_window": None}),
    "qwen3_yarn": Tiny("Qwen3", {"head_dim": 12, "rope_parameters": YARN_ROPE}, seed=1),
    "mistral_windowed": Tiny("Mistral", {"sliding_window": WINDOW}),
    "mixtral": Tiny(
        "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}
    ),
    "qwen3_moe": Tiny(
        "Qwen3Moe",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
        seed=3,
    ),
    "gemma3": Tiny(
        "Gemma3",
        {
            "num_hidden_layers": 3,
            "head_dim": 20,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}
RARE = {
    "qwen2": Tiny(
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
            "rope_parameters": YARN_ROPE
            | {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 8, "truncate": False},
        },
    ),
    "qwen3": Tiny(
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": YARN_ROPE | {"attention_factor": 1.3},
        },
    ),
    "qwen3_moe": Tiny(
        "Qwen3Moe",
        {
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "attention_bias": True,
        },
    ),
    "mixtral": Tiny("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "head_dim": 8}),
    "gemma3": Tiny(
        "Gemma3", {"num_hidden_layers": 7, "head_dim": 8, "sliding_window": 5, "hidden_size": 40}
    ),
}
"""What one look at is enough for: other ways through code that `TINY` goes through."""
NATIVE = tuple(TINY)
"""Those of `TINY` that the native kernels compute; torch computes all of them."""


def kernels_of(name: str) -> list[str]:
    """What can compute `TINY[name]`, or the bundled model, here."""
    native = accel.NATIVE and (name in NATIVE or name not in TINY)
    return ["torch", "native"] if native else ["torch"]


WITH_KERNELS = [(name, kernels) for name in TINY for kernels in kernels_of(name)]
"""Every configuration with everything that can compute it."""


def build(tiny: Tiny) -> Any:
    """A model whose every parameter matters: biases and norms are random too."""
    torch.manual_seed(tiny.seed)
    model = getattr(transformers, f"{tiny.family}ForCausalLM")(tiny.config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                # Wide enough for logits to differ clearly from token to token.
                parameter.normal_(0.0, 0.25)
    return model.eval()


@functools.cache
def checkpoint(name: str, rare: bool = False) -> tuple[Path, Any]:
    """(directory, `transformers` model) of `TINY[name]`, or `RARE`; made once per test run."""
    model = build((RARE if rare else TINY)[name])
    directory = Path(_home().name) / ("rare" if rare else "tiny") / name
    model.save_pretrained(directory)
    return directory, model


@functools.cache
def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pdserve-test-")


@torch.inference_mode()
def oracle_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """`[len(tokens), vocab]`: row i is the distribution after `tokens[: i + 1]`."""
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.float().log_softmax(-1)


@torch.inference_mode()
def oracle_generate(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation, ends ignored."""
    cache = transformers.DynamicCache(config=model.config)
    step, output = prompt, []
    for _ in range(count):
        logits = model(torch.tensor([step]), past_key_values=cache).logits[0, -1]
        best = logits.topk(2).values
        assert best[0] - best[1] > 2e-4, "a near tie would make token equality a matter of luck"
        output.append(int(logits.argmax()))
        step = output[-1:]
    return output
