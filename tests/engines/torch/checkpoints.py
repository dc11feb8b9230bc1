"""Tiny random checkpoints of every family, and `transformers` as the oracle for them."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pdserve import accel
from tests.support.seeds import is_long, number_for, run_seed

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
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 7.0, 9.0],
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
WINDOW = 12
"""Shorter than the tests' prompts, and no multiple of a block."""


@dataclass(frozen=True)
class Tiny:
    """One small configuration; `fields` override the common ones."""

    family: str
    fields: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    outer: dict[str, Any] = field(default_factory=dict)
    """For a multimodal model, of which `fields` are the text part: the whole's other fields."""

    @property
    def architecture(self) -> str:
        return self.family + ("ForConditionalGeneration" if self.outer else "ForCausalLM")

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
            "pad_token_id": None,
        }
        if self.outer:
            whole = getattr(transformers, self.family + "Config")
            return whole(text_config=common | self.fields, **self.outer)
        suffix = "TextConfig" if self.family == "Gemma3" else "Config"
        return getattr(transformers, self.family + suffix)(**common | self.fields)


QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "patch_size": 4,
    "out_hidden_size": 48,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
"""Of both generations; each ignores the other's keys."""
PIXTRAL_VISION = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 16,
    "patch_size": 4,
}

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
    "gpt_oss": Tiny(
        "GptOss",
        {
            "num_hidden_layers": 3,
            "head_dim": 20,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "rope_parameters": YARN_ROPE | {"truncate": False},
            "swiglu_limit": 0.9,
        },
        seed=5,
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
    "gemma2": Tiny(
        "Gemma2",
        {
            "head_dim": 20,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "phi3": Tiny(
        "Phi3",
        {
            "hidden_size": 64,
            "rope_parameters": LONG_ROPE,
            "original_max_position_embeddings": 16,
            "sliding_window": WINDOW,
        },
    ),
    "olmo2": Tiny("Olmo2", {"num_attention_heads": 6}, seed=1),
    "olmo3": Tiny(
        "Olmo3",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": YARN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "granite": Tiny(
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.5,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": Tiny("SmolLM3", {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}),
    "glm4": Tiny("Glm4", {"head_dim": 20, "rope_parameters": {"rope_theta": 10000.0}}),
    "seed_oss": Tiny(
        "SeedOss",
        {"head_dim": 20, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    ),
    "cohere2": Tiny(
        "Cohere2",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "logit_scale": 0.8,
        },
    ),
    "mistral3": Tiny(
        "Mistral3",
        {"model_type": "mistral", "head_dim": 20, "sliding_window": None},
        outer={"vision_config": PIXTRAL_VISION, "tie_word_embeddings": False},
    ),
    "qwen2_5_vl": Tiny(
        "Qwen2_5_VL",
        {"rope_parameters": MROPE},
        outer={"vision_config": QWEN_VISION, "tie_word_embeddings": True},
    ),
    "qwen3_vl": Tiny(
        "Qwen3VL",
        {"head_dim": 12, "rope_parameters": MROPE | {"mrope_interleaved": True}},
        outer={"vision_config": QWEN_VISION, "tie_word_embeddings": False},
    ),
    "qwen3_vl_moe": Tiny(
        "Qwen3VLMoe",
        {
            "head_dim": 12,
            "rope_parameters": MROPE | {"mrope_interleaved": True},
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "mlp_only_layers": [0],
        },
        outer={"vision_config": QWEN_VISION, "tie_word_embeddings": False},
    ),
}
RARE = {
    "qwen2_windowed": Tiny(
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
            "rope_parameters": YARN_ROPE
            | {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 8, "truncate": False},
        },
    ),
    "qwen3_windowed": Tiny(
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": YARN_ROPE | {"attention_factor": 1.3},
        },
        seed=1,
    ),
    "qwen3_moe_windowed": Tiny(
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
    "mixtral_one_expert": Tiny(
        "Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "head_dim": 8}
    ),
    "gemma3_narrow": Tiny(
        "Gemma3",
        {"num_hidden_layers": 7, "head_dim": 8, "sliding_window": 5, "hidden_size": 40},
        seed=1,
    ),
    "llama_dynamic": Tiny("Llama", {"rope_parameters": DYNAMIC_ROPE}),
    "phi3_plain": Tiny("Phi3", seed=1),
    "olmo2_biased": Tiny("Olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "olmo3_plain": Tiny("Olmo3", {"num_hidden_layers": 5, "sliding_window": WINDOW}),
    "smollm3_windowed": Tiny(
        "SmolLM3",
        {
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma": Tiny("Gemma", {"head_dim": 20}),
    "glm": Tiny("Glm", {"head_dim": 24, "rope_parameters": {"rope_theta": 10000.0}}),
    "cohere": Tiny("Cohere", {"attention_bias": True, "logit_scale": 0.8}),
    "exaone4": Tiny("Exaone4", {"sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "exaone4_full": Tiny(
        "Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}
    ),
    "ernie4_5": Tiny("Ernie4_5", {"head_dim": 16, "use_bias": True}, seed=1),
    "glm4_unbiased": Tiny(
        "Glm4", {"head_dim": 24, "attention_bias": False, "num_key_value_heads": 4}
    ),
    "cohere2_biased": Tiny(
        "Cohere2",
        {
            "num_hidden_layers": 5,
            "sliding_window": WINDOW,
            "attention_bias": True,
            "logit_scale": 0.5,
        },
        seed=2,
    ),
    "gemma2_uncapped": Tiny(
        "Gemma2",
        {
            "num_hidden_layers": 5,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "head_dim": 8,
        },
        seed=5,
    ),
    "qwen2_vl": Tiny(
        "Qwen2VL",
        {"rope_parameters": MROPE},
        outer={"vision_config": {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 48}},
    ),
    "mistral3_plain": Tiny(
        "Mistral3", {"model_type": "mistral"}, outer={"vision_config": PIXTRAL_VISION}
    ),
    "ministral3": Tiny(
        "Mistral3",
        {
            "model_type": "ministral3",
            "head_dim": 16,
            "rope_parameters": YARN_ROPE | {"llama_4_scaling_beta": 0.5, "factor": 8.0},
        },
        outer={"vision_config": PIXTRAL_VISION, "tie_word_embeddings": False},
    ),
    "ministral3_text": Tiny(
        "Ministral3", {"head_dim": 12, "rope_parameters": YARN_ROPE | {"llama_4_scaling_beta": 0.9}}
    ),
}
"""Families and settings that few checkpoints have: other ways through code that `TINY` takes. A run
looks at each once, and tries one of them in all ways: `DRAWN`."""
CONFIGURATIONS = TINY | RARE
DRAWN = tuple(RARE) if is_long() else (list(RARE)[number_for(run_seed(), "rare") % len(RARE)],)
"""Those of `RARE` that this run tries in all ways."""
NATIVE = tuple(TINY)
"""Those of `TINY` that the native kernels compute, as they do all of `RARE`; torch computes all."""
SELDOM_BY_TORCH = ("mistral_windowed", "mixtral", "qwen3_moe", "gpt_oss", "gemma3")
"""Those that torch computes in a slice of the tests only, where the native kernels compute, too."""
SELDOM = (*list(TINY)[list(TINY).index("gemma2") :],)
"""Those of `TINY` that a run takes a slice of: each goes through code that others go through, too.
`test_every_family_computes_the_tokens_of_transformers` takes them always."""


def kernels_of(name: str) -> list[str]:
    """What can compute this configuration, or the bundled model, here."""
    native = accel.NATIVE and (name in NATIVE or name not in TINY)
    return ["torch", "native"] if native else ["torch"]


def _marks(name: str, kernels: str = "") -> list[pytest.MarkDecorator]:
    by_torch = kernels == "torch" and accel.NATIVE
    seldom = name in SELDOM or (by_torch and (name in SELDOM_BY_TORCH or name in RARE))
    return [pytest.mark.long] if seldom else []


NAMES = [pytest.param(name, marks=_marks(name)) for name in (*TINY, *DRAWN)]
"""Every configuration of this run."""
WITH_KERNELS = [
    pytest.param(name, kernels, marks=_marks(name, kernels), id=f"{name}-{kernels}")
    for name in (*TINY, *DRAWN)
    for kernels in kernels_of(name)
]
"""Every configuration of this run with everything that can compute it."""


def build(tiny: Tiny, context: int = 0) -> Any:
    """A model whose every parameter matters: biases and norms are random too. Angles that depend on
    the length are those of `context` tokens; 0: of the longest."""
    torch.manual_seed(tiny.seed)
    model = getattr(transformers, tiny.architecture)(tiny.config())
    _pin_angles(model, context)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                # Wide enough for logits to differ clearly from token to token.
                parameter.normal_(0.0, 0.25)
    return model.eval()


def _pin_angles(model: Any, context: int) -> None:
    """Let a rotary embedding that depends on the sequence's length turn by one context, whatever
    the length, so that computed keys stay valid."""
    rope = model.config.get_text_config().rope_parameters
    if rope.get("rope_type") not in ("dynamic", "longrope"):
        return
    rotary, context = model.model.rotary_emb, context or int(POSITIONS * rope.get("factor", 1))
    frequencies, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](model.config, None, seq_len=context)
    rotary.inv_freq = frequencies
    rotary.rope_type = "default"


@functools.cache
def checkpoint(name: str) -> tuple[Path, Any]:
    """(directory, `transformers` model) of a configuration; made once per test run."""
    model = build(CONFIGURATIONS[name])
    directory = Path(_home().name) / name
    model.save_pretrained(directory)
    return directory, model


@functools.cache
def model_for(name: str, context: int) -> Any:
    """The same model for an engine with a shorter `max_model_len`."""
    return build(CONFIGURATIONS[name], context) if "dynamic" in name else checkpoint(name)[1]


@functools.cache
def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pdserve-test-")


@torch.inference_mode()
def oracle_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """`[len(tokens), vocab]`: row i is the distribution after `tokens[: i + 1]`."""
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.float().log_softmax(-1)


def oracle_generate(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation, ends ignored. Computed once for a model and a prompt: many tests ask for
    the same."""
    return list(_generated(model, tuple(prompt), count))


@functools.cache
@torch.inference_mode()
def _generated(model: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    cache = transformers.DynamicCache(config=model.config)
    step, output = list(prompt), []
    for _ in range(count):
        logits = model(torch.tensor([step]), past_key_values=cache).logits[0, -1]
        best = logits.topk(2).values
        assert best[0] - best[1] > 2e-4, "a near tie would make token equality a matter of luck"
        output.append(int(logits.argmax()))
        step = output[-1:]
    return output
