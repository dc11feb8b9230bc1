"""Tiny random models that see, of the families whose processors need torchvision.

They name an image in a prompt in different ways: Qwen2.5-VL's mark, LLaVA's and Pixtral's is one
token, Qwen3-VL's has two around it. What an image becomes differs, too: one token many times, or
rows of it with others between them.
"""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file, save_file

from tests.engines.vllm.vision_model import randomised, write_tokenizer

_QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_PIXTRAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_GEMMA = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
_NEWLINES = ("\n", "\n" * 2, "\n" * 3, "\n" * 4)
"""An image of Gemma 3 has two newlines on each side, which join others beside it to one token."""
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 3,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_VISION: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
_QWEN_VISION = _VISION | {"depth": 2, "num_heads": 2, "out_hidden_size": 64}
_QWEN_TOKENS = {
    "vision_start_token_id": 1280,
    "vision_end_token_id": 1281,
    "image_token_id": 1282,
    "video_token_id": 1283,
}
_SQUARES = {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
_PIXELS: dict[str, Any] = {
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
}
"""Every published checkpoint says these. vLLM reads them here where the model's own code scales."""


@dataclass(frozen=True)
class Family:
    """One family: its configuration, and its processor's files."""

    model: str
    """Name of the class in transformers, without `ForConditionalGeneration`."""
    marks: tuple[str, ...]
    """Special tokens, from 1280 on."""
    image: int
    """The token that stands for an image in a prompt."""
    mark: str
    """What a template writes for an image."""
    text: dict[str, Any]
    vision: dict[str, Any]
    processor: str
    preprocessor: dict[str, Any]
    outer: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    """Of `tokenizer_config.json`."""
    left_out: str = ""
    """An output of the processor that vLLM for CPUs does not look at."""
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    """Of `processor_config.json`."""
    tower: str = "vision_tower."
    """How the names of the vision tower's tensors begin in published checkpoints."""

    @property
    def template(self) -> str:
        return (
            "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\n' -}}"
            "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
            "{%- for part in message['content'] -%}{%- if part['type'] == 'image' -%}"
            f"{{{{- '{self.mark}' -}}}}"
            "{%- else -%}{{- part['text'] -}}{%- endif -%}{%- endfor -%}{%- endif -%}"
            "{{- '<|im_end|>\n' -}}{%- endfor -%}"
            "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
        )


def _rope(sections: list[int], **more: object) -> dict[str, Any]:
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    return {"rope_parameters": {**plain, "mrope_section": sections, **more}}


FAMILIES = {
    "qwen2_5_vl": Family(
        "Qwen2_5_VL",
        _QWEN,
        image=1282,
        mark="<|vision_start|><|image_pad|><|vision_end|>",
        text=_rope([4, 6, 6]),
        vision=_QWEN_VISION | {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        processor="Qwen2_5_VLProcessor",
        preprocessor={
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": 28 * 28,
            "max_pixels": 28 * 28 * 16,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
        },
        outer=_QWEN_TOKENS,
    ),
    "qwen3_vl": Family(
        "Qwen3VL",
        _QWEN,
        image=1282,
        mark="<|vision_start|><|image_pad|><|vision_end|>",
        text=_rope([6, 5, 5], mrope_interleaved=True),
        vision=_QWEN_VISION
        | {"patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        processor="Qwen3VLProcessor",
        preprocessor={
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 16},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
        },
        outer=_QWEN_TOKENS,
    ),
    "llava": Family(
        "Llava",
        ("<image>",),
        image=1280,
        mark="<image>",
        text={"model_type": "llama"},
        vision=_VISION | _SQUARES | {"model_type": "clip_vision_model", "num_hidden_layers": 3},
        processor="LlavaProcessor",
        preprocessor={
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
        },
        outer={"image_token_index": 1280, "image_seq_length": 16},
        settings={
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        tower="vision_tower.vision_model.",
    ),
    "pixtral": Family(
        "Llava",
        _PIXTRAL,
        image=1280,
        mark="[IMG]",
        text={"model_type": "mistral", "sliding_window": None},
        vision=_VISION | _SQUARES | {"model_type": "pixtral", "image_size": 112, "head_dim": 32},
        processor="PixtralProcessor",
        preprocessor={
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 112},
            "patch_size": {"height": 14, "width": 14},
        },
        outer={
            "image_token_index": 1280,
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
        },
        settings={"patch_size": 14},
    ),
    "mistral3": Family(
        "Mistral3",
        _PIXTRAL,
        image=1280,
        mark="[IMG]",
        text={"model_type": "mistral", "sliding_window": None},
        vision=_VISION | _SQUARES | {"model_type": "pixtral", "image_size": 168, "head_dim": 32},
        processor="PixtralProcessor",
        preprocessor={
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 168},
            "patch_size": 14,
        },
        outer={"image_token_index": 1280, "spatial_merge_size": 2, "tie_word_embeddings": False},
        settings={"patch_size": 14, "spatial_merge_size": 2},
    ),
    "gemma3": Family(
        "Gemma3",
        _GEMMA + _NEWLINES,
        image=1280,
        mark="<start_of_image>",
        text={
            "num_hidden_layers": 4,
            "layer_types": ["full_attention"] * 4,
            "query_pre_attn_scalar": 32,
        },
        vision=_VISION | _SQUARES | {"model_type": "siglip_vision_model", "vision_use_head": False},
        processor="Gemma3Processor",
        preprocessor={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 56, "width": 56},
        },
        outer={
            "boi_token_index": 1280,
            "eoi_token_index": 1281,
            "image_token_index": 1282,
            "mm_tokens_per_image": 4,
        },
        tokenizer={
            "extra_special_tokens": {
                "boi_token": _GEMMA[0],
                "eoi_token": _GEMMA[1],
                "image_token": _GEMMA[2],
            }
        },
        settings={"image_seq_length": 4},
        # vLLM for CPUs lets an image's tokens see only those before them, as text does.
        left_out="token_type_ids",
        seed=3,
        tower="vision_tower.vision_model.",
    ),
}


@functools.cache
def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pdserve-vision-families-")


@functools.cache
def family_checkpoint(name: str) -> tuple[Path, Any]:
    """(directory, transformers' model)."""
    family = FAMILIES[name]
    text = _TEXT | {"vocab_size": 1280 + len(family.marks)} | family.text
    config = getattr(transformers, f"{family.model}Config")(
        text_config=text, vision_config=family.vision, **family.outer
    )
    config.pad_token_id = 0
    kind = getattr(transformers, f"{family.model}ForConditionalGeneration")
    model = randomised(kind, config, seed=family.seed)
    folder = Path(_home().name) / name
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("vision_tower.", family.tower): tensors[name] for name in tensors}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    named: dict[str, Any] = {"processor_class": family.processor}
    fields = named | family.tokenizer | {"chat_template": family.template}
    write_tokenizer(folder, family.marks, fields)
    pixels = named | _PIXELS | family.preprocessor
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    (folder / "processor_config.json").write_text(json.dumps(named | family.settings))
    return folder, model
