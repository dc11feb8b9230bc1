"""Models of real sizes without their weights: a checkpoint's files, made on the spot.

The tensor file is a hole: it takes no room on disk however large the model is. Whoever loads it
fills the weights in place (`fill`), since a device multiplies zeros with less effort than numbers.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

BUNDLED = Path(__file__).parents[2] / "pdserve" / "bundled"
"""The bundled model, whose tokenizer is the base of every other one here."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder with grouped queries."""

    family: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    context: int = 40960

    @property
    def layer_parameters(self) -> int:
        """Parameters in the matrices of one layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.inner

    @property
    def step_parameters(self) -> int:
        """Parameters that a decode step reads. The embedding table counts only if it is also the
        output layer."""
        return self.layers * self.layer_parameters + self.hidden * self.vocab

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of KV of one token, in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * itemsize

    def prefill_operations(self, tokens: int) -> int:
        """Operations of a prompt's prefill, products and attention; only the last token gets
        logits."""
        products = 2 * tokens * self.layers * self.layer_parameters
        looks = tokens * (tokens + 1) // 2
        attention = 4 * looks * self.heads * self.head_dim * self.layers
        return products + attention + 2 * self.hidden * self.vocab


SHAPES = {
    "llama-3.2-1b": Shape("llama", 2048, 8192, 16, 32, 8, 64, 128256, True),
    "qwen3-0.6b": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True),
    "llama-3.1-8b": Shape("llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
    "qwen3-8b": Shape("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False),
    "small-llama": Shape("llama", 64, 128, 2, 4, 2, 16, 128256, True, 4096),
    "tiny": Shape("qwen3", 32, 64, 2, 4, 2, 8, 128, True, 256),
}


def write(shape: Shape, folder: Path) -> Path:
    """Writes `config.json` and the tensor files, which hold only zeros."""
    (folder / "config.json").write_text(json.dumps(_config(shape)))
    header: dict[str, Any] = {}
    end = 0
    for name, size in _tensors(shape):
        begin, count = end, 1
        for extent in size:
            count *= extent
        end = begin + 2 * count
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


def write_filled(shape: Shape, folder: Path, device: str) -> Path:
    """Writes `config.json` and random weights in bfloat16, made on `device`."""
    from safetensors.torch import save_file

    write(shape, folder)
    tensors = {
        name: torch.empty(size, dtype=torch.bfloat16, device=device)
        for name, size in _tensors(shape)
    }
    fill(tensors.values())
    on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
    save_file(on_host, folder / "model.safetensors")
    return folder


def write_tokenizer(shape: Shape, folder: Path) -> None:
    """Writes the bundled model's tokenizer with a word for every further token of the model.

    A model with random weights chooses among all its tokens, and a token without text would never
    reach a client. No text is encoded to these words, since no merge makes them.
    """
    tokenizer = json.loads((BUNDLED / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    # In a byte-level vocabulary this letter stands for a blank.
    vocab |= {f"\u0120word{token}": token for token in range(len(vocab), shape.vocab)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    config = json.loads((BUNDLED / "tokenizer_config.json").read_text())
    config["model_max_length"] = shape.context
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": [f"{shape.family.title()}ForCausalLM"],
        "model_type": shape.family,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    }


def _tensors(shape: Shape) -> Iterable[tuple[str, tuple[int, ...]]]:
    hidden, inner, dim = shape.hidden, shape.inner, shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab, hidden)
    for layer in range(shape.layers):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (hidden,)
        yield f"{name}.post_attention_layernorm.weight", (hidden,)
        yield f"{name}.self_attn.q_proj.weight", (shape.heads * dim, hidden)
        yield f"{name}.self_attn.k_proj.weight", (shape.kv_heads * dim, hidden)
        yield f"{name}.self_attn.v_proj.weight", (shape.kv_heads * dim, hidden)
        yield f"{name}.self_attn.o_proj.weight", (hidden, shape.heads * dim)
        if shape.family == "qwen3":
            yield f"{name}.self_attn.q_norm.weight", (dim,)
            yield f"{name}.self_attn.k_norm.weight", (dim,)
        yield f"{name}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{name}.mlp.up_proj.weight", (inner, hidden)
        yield f"{name}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab, hidden)


def fill(tensors: Iterable[torch.Tensor], seed: int = 0) -> None:
    """Fills norms with ones and matrices with small random numbers."""
    torch.manual_seed(seed)
    for tensor in tensors:
        if tensor.dim() == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02)
