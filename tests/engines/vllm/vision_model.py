"""A tiny random Idefics3 that vLLM for CPUs can compute, and pictures for it.

How many tokens a picture takes depends on its size, and many of them have other ids than the one
that stands for it. `vision_families` has models of other families.
"""

from __future__ import annotations

import functools
import io
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from PIL import Image

import pdserve

if TYPE_CHECKING:
    from collections.abc import Sequence

IMG = 1281
"""The placeholder of an image in a prompt."""
_ADDED = (
    *("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
VOCAB = 1280 + len(_ADDED)

TEMPLATE = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}{%- if part['type'] == 'image' -%}{{- '<image>' -}}"
    "{%- else -%}{{- part['text'] -}}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 3,
    "bos_token_id": 1,
}
_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}


@functools.cache
def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pdserve-vision-")


@functools.cache
def vision_checkpoint(seed: int = 0) -> tuple[Path, Any]:
    """(directory, transformers' model)."""
    config = transformers.Idefics3Config(
        text_config=_TEXT, vision_config=_VISION, image_token_id=IMG
    )
    config.pad_token_id = 0
    model = randomised(transformers.Idefics3ForConditionalGeneration, config, seed)
    folder = Path(_home().name) / f"vision-{seed}"
    model.save_pretrained(folder)
    _write_processor(folder)
    return folder, model


def randomised(kind: Any, config: Any, seed: int) -> Any:
    """A model whose every parameter matters."""
    torch.manual_seed(seed)
    model = kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.25)
    return model.eval()


def _write_processor(folder: Path) -> None:
    kind = {"processor_class": "Idefics3Processor"}
    write_tokenizer(folder, _ADDED, kind | {"chat_template": TEMPLATE})
    image = kind | {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 112},
        "max_image_size": {"longest_edge": 56},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    (folder / "processor_config.json").write_text(json.dumps(kind | {"image_seq_len": 4}))


def write_tokenizer(folder: Path, added: Sequence[str], fields: dict[str, Any]) -> None:
    """Write the bundled tokenizer with these special tokens behind its vocabulary."""
    bundled = Path(pdserve.__file__).parent / "bundled"
    tokenizer = json.loads((bundled / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        like | {"id": id, "content": content} for id, content in enumerate(added, 1280)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((bundled / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | fields))


def picture(seed: int, width: int = 84, height: int = 56, format: str = "PNG") -> bytes:
    """A file of coarse noise, so that two of them look different to the model."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randint(0, 256, (4, 6, 3), generator=generator, dtype=torch.uint8)
    image = Image.fromarray(coarse.numpy()).resize((width, height), Image.Resampling.NEAREST)
    file = io.BytesIO()
    image.save(file, format=format)
    return file.getvalue()


@torch.inference_mode()
def expected(
    model: Any, folder: Path, text: str, files: list[bytes], count: int, left_out: str = ""
) -> Any:
    """(expanded prompt, greedy tokens, distances of the two best logits) of transformers. The text
    has a mark for each file. `left_out`: what the processor makes and the model shall not get."""
    processor = transformers.AutoProcessor.from_pretrained(folder)
    images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
    made = processor(text=text, images=images, return_tensors="pt", add_special_tokens=False)
    tokens: list[int] = made.pop("input_ids")[0].tolist()
    for unused in ("attention_mask", left_out):
        made.pop(unused, None)
    output: list[int] = []
    gaps: list[float] = []
    for _ in range(count):
        logits = model(input_ids=torch.tensor([tokens + output]), **made).logits
        best = logits[0, -1].float().topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        output.append(int(best.indices[0]))
        if "mm_token_type_ids" in made:
            types = made["mm_token_type_ids"]
            made["mm_token_type_ids"] = torch.cat([types, torch.zeros_like(types[:, :1])], 1)
    return tokens, output, gaps
