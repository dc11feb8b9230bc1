"""Tiny random checkpoints that vLLM for CPUs can compute, and the tokens they choose.

Its attention takes heads of 32 and more.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

import pdserve
from pdserve.messages.lora import LoraAdapter

VOCAB = 256
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "eos_token_id": 7,
    "bos_token_id": 1,
}
_FIELDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Gemma3": {
        "num_hidden_layers": 4,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 32,
    },
}
FAMILIES = tuple(_FIELDS)


@functools.cache
def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pdserve-vllm-")


def random_model(family: str, seed: int) -> Any:
    """Transformers' model in float32 with random weights of all kinds."""
    suffix = "TextConfig" if family == "Gemma3" else "Config"
    config = getattr(transformers, family + suffix)(**_SHAPE | _FIELDS[family])
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.25)
    return model.eval()


@functools.cache
def checkpoint(family: str, seed: int = 0) -> tuple[Path, Any]:
    """(directory, model)."""
    model = random_model(family, seed)
    return _saved(model, f"{family}-{seed}"), model


@functools.cache
def classifier(family: str, labels: int, seed: int = 0) -> tuple[Path, Any]:
    """(directory, model) of a model with a classification head."""
    body = random_model(family, seed)
    body.config.num_labels = labels
    body.config.pad_token_id = 0
    model = getattr(transformers, f"{family}ForSequenceClassification")(body.config).eval()
    model.model = body.model
    with torch.no_grad():
        model.score.weight.normal_(0.0, 0.25)
    return _saved(model, f"{family}-{seed}-{labels}"), model


def _saved(model: Any, name: str) -> Path:
    directory = Path(_home().name) / name
    model.save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):  # vLLM reads one, and nothing uses it
        shutil.copy(Path(pdserve.__file__).parent / "bundled" / file, directory)
    return directory


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """(tokens, distance of the two best logits at each)."""
    output: list[int] = []
    gaps: list[float] = []
    for _ in range(count):
        best = model(torch.tensor([prompt + output])).logits[0, -1].float().topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        output.append(int(best.indices[0]))
    return output, gaps


def adapter(name: str, seed: int, base: Any, rank: int = 8) -> LoraAdapter:
    """A random adapter of all attention projections, large enough to change most answers."""
    directory = Path(_home().name) / f"adapter-{name}-{seed}"
    directory.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for path, module in base.named_modules():
        if path.rsplit(".", 1)[-1] in ("q_proj", "k_proj", "v_proj", "o_proj"):
            rows, columns = module.weight.shape
            for part, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                key = f"base_model.model.{path}.lora_{part}.weight"
                weights[key] = torch.randn(shape, generator=generator) * 0.1
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "base",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return LoraAdapter(name=name, path=str(directory), revision=f"{seed:x}", rank=rank)


def merged(base: Any, one: LoraAdapter) -> Any:
    """The base with the adapter in its weights: what each adapted answer must equal."""
    from safetensors.torch import load_file

    model = type(base)(base.config)
    model.load_state_dict(base.state_dict())
    weights = load_file(Path(one.path) / "adapter_model.safetensors")
    with torch.no_grad():
        for path, module in model.named_modules():
            a = weights.get(f"base_model.model.{path}.lora_A.weight")
            if a is not None:
                b = weights[f"base_model.model.{path}.lora_B.weight"]
                module.weight += 2.0 * (b @ a)
    return model.eval()
