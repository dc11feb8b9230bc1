"""A tiny random checkpoint: a whole model in a megabyte, for tests of everything around it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from tests.text import builders
from tests.text.templates import QWEN

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER = 64, 2, 4, 2, 96
CONTEXT = 2048

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


THINKS = QWEN + "{% if thinks %}{{ '<think>\\n' }}{% endif %}"
"""A template that knows of tools, and opens the reasoning if it is told to."""
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def write_model(
    folder: Path,
    *,
    hidden: int = HIDDEN,
    inner: int = INNER,
    template: str = TEMPLATE,
    markers: tuple[str, ...] = (),
) -> Path:
    """Write the checkpoint to `folder`; the same bytes every time. `markers`: special tokens
    besides the tokenizer's own."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer.from_str(builders.byte_level().to_str())
    tokenizer.add_special_tokens(list(markers))
    vocab = tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    _write(folder / "config.json", config)
    _write(folder / "tokenizer_config.json", {"chat_template": template})
    _write(folder / "generation_config.json", {"eos_token_id": 1})
    save_file(
        _weights(vocab, hidden, inner), folder / "model.safetensors", metadata={"format": "pt"}
    )
    return folder


def _weights(vocab: int, hidden: int, inner: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    head = hidden // HEADS

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.normal(0, 0.2, (rows, columns)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(vocab, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": matrix(vocab, hidden),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": np.ones(hidden, np.float32),
            f"{name}.post_attention_layernorm.weight": np.ones(hidden, np.float32),
            f"{name}.self_attn.q_proj.weight": matrix(HEADS * head, hidden),
            f"{name}.self_attn.k_proj.weight": matrix(KV_HEADS * head, hidden),
            f"{name}.self_attn.v_proj.weight": matrix(KV_HEADS * head, hidden),
            f"{name}.self_attn.o_proj.weight": matrix(hidden, HEADS * head),
            f"{name}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    return weights


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))
