"""Writes tiny quantised checkpoints with gptqmodel, and the logits that it computes from them.

    PYTHON gptqmodel_writer.py FOLDER

PYTHON is an interpreter with gptqmodel; this file needs nothing of pdserve. FOLDER/cases.json is a
list of objects: `name`, `bits`, `group_size`, `desc_act`, `sym` and `format` as gptqmodel calls
them, and `prompt`, token ids. For each case, FOLDER/NAME is the checkpoint as gptqmodel saved it,
and FOLDER/NAME.logits.json the logits after the prompt: those of the model as gptqmodel loads it
again, its scales, and so all products, in float32.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# With one core it has too few workers for itself.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import torch
import transformers
from tokenizers import Tokenizer, models

VOCAB = 160


def build(folder: Path) -> None:
    """Save a Llama of two layers whose every parameter matters, with the tokenizer that gptqmodel
    wants to see."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.15)
    model.half().save_pretrained(folder)
    words = {f"w{number}": number for number in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w1", eos_token="w2", pad_token="w0"
    ).save_pretrained(folder)


def quantise(plain: Path, folder: Path, case: dict[str, Any]) -> None:
    """Let gptqmodel quantise the model over random tokens, and save it."""
    gptqmodel: Any = import_module("gptqmodel")  # it changes the environment
    names = ("bits", "group_size", "desc_act", "sym", "format")
    config = gptqmodel.QuantizeConfig(**{name: case[name] for name in names}, offload_to_disk=False)
    model = gptqmodel.GPTQModel.load(str(plain), config)
    torch.manual_seed(1)
    rows = torch.randint(3, VOCAB, (24, 64))
    # A few tokens are far more frequent, so that the activations have an order.
    rows[:, ::3] = torch.randint(3, 9, rows[:, ::3].shape)
    examples = [
        {"input_ids": row[None], "attention_mask": torch.ones(1, 64).long()} for row in rows
    ]
    model.quantize(examples, batch_size=1)
    model.save(str(folder))


def logits(folder: Path, prompt: list[int]) -> list[float]:
    """What gptqmodel computes after `prompt` from the files that it wrote."""
    gptqmodel: Any = import_module("gptqmodel")
    backend = gptqmodel.BACKEND.GPTQ_TORCH
    # Left to itself it rounds everything to bfloat16.
    loaded = gptqmodel.GPTQModel.load(
        str(folder), device="cpu", backend=backend, dtype=torch.float16
    )
    layer = loaded.model.model.layers[0].mlp.down_proj
    assert hasattr(layer, "qweight"), "the saved model is not quantised"
    assert layer.scales.dtype == loaded.model.dtype == torch.float16
    model = loaded.model.float()
    assert layer.scales.dtype == torch.float32
    with torch.inference_mode():
        found: list[float] = model(torch.tensor([prompt])).logits[0, -1].tolist()
    return found


def main(folder: Path) -> None:
    """Write all cases."""
    plain = folder / "plain"
    build(plain)
    for case in json.loads((folder / "cases.json").read_text()):
        target = folder / case["name"]
        quantise(plain, target, case)
        found = logits(target, case["prompt"])
        (folder / f"{case['name']}.logits.json").write_text(json.dumps(found))
        print("wrote", case["name"], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
