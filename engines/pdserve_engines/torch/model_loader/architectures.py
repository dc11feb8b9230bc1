"""Names the architectures that this engine serves, and says which other engine serves the rest.

It knows names only; `families.py` knows how the families compute.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pdserve.errors import UnsupportedCheckpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve_engines.torch.model_loader.config_keys import Json

ModelFamily = Literal[
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "mixtral",
    "qwen3_moe",
    "qwen3_vl_moe",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "olmo3",
    "granite",
    "smollm3",
    "glm",
    "glm4",
    "seed_oss",
    "gpt_oss",
    "cohere",
    "cohere2",
    "exaone4",
    "ernie4_5",
]

TEXT_PARTS: Mapping[str, ModelFamily] = {
    "Gemma3ForConditionalGeneration": "gemma3",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2VLForConditionalGeneration": "qwen2",
    "Qwen2_5_VLForConditionalGeneration": "qwen2",
    "Qwen3VLForConditionalGeneration": "qwen3",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
}
"""Multimodal architectures, of which the text part is served, and that part's family."""

ARCHITECTURES: Mapping[str, ModelFamily] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
    "Ministral3ForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
    "SeedOssForCausalLM": "seed_oss",
    "GptOssForCausalLM": "gpt_oss",
    "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere2",
    "Exaone4ForCausalLM": "exaone4",
    "Ernie4_5ForCausalLM": "ernie4_5",
    **TEXT_PARTS,
}

HEADLESS_ARCHITECTURES: Mapping[str, ModelFamily] = {
    "LlamaModel": "llama",
    "Qwen2Model": "qwen2",
    "Qwen3Model": "qwen3",
    "MistralModel": "mistral",
}
"""Architecture names of embedding models, which have no output layer after the final norm."""

CLASSIFIER_ARCHITECTURES: Mapping[str, ModelFamily] = {
    "LlamaForSequenceClassification": "llama",
    "Qwen2ForSequenceClassification": "qwen2",
    "Qwen3ForSequenceClassification": "qwen3",
    "MistralForSequenceClassification": "mistral",
    "MixtralForSequenceClassification": "mixtral",
    "Qwen3MoeForSequenceClassification": "qwen3_moe",
    "Gemma3TextForSequenceClassification": "gemma3",
}
"""Architecture names of models with a classification head instead of an output layer."""

VLLM_SERVES_IT = (
    "--engine=vllm serves it: pip install 'pdserve[vllm]', then pdserve serve MODEL --engine=vllm"
)


def family_of(raw: Json) -> ModelFamily:
    """The family of a `config.json`. Raises `UnsupportedCheckpoint`, which names the engine that
    serves another architecture."""
    names = architectures(raw)
    for name in names:
        family = ARCHITECTURES.get(name) or HEADLESS_ARCHITECTURES.get(name)
        family = family or CLASSIFIER_ARCHITECTURES.get(name)
        if family is not None:
            return family
    found = ", ".join(names) or "none"
    remedy = f"it serves {', '.join(ARCHITECTURES)}"
    if not vllm_architectures().isdisjoint(names):
        remedy = VLLM_SERVES_IT
    raise UnsupportedCheckpoint(
        f"config.json: architecture {found} is not supported by the torch engine; {remedy}"
    )


def architectures(raw: Json) -> list[str]:
    """What the key `architectures` names."""
    names = raw.get("architectures") or []
    return [str(name) for name in names] if isinstance(names, list) else [str(names)]


@cache
def vllm_architectures() -> frozenset[str]:
    """The architectures that vLLM serves, in the release that pdserve is made for."""
    listed = Path(__file__).with_name("vllm_architectures.txt").read_text(encoding="utf-8")
    return frozenset(line for line in listed.splitlines() if not line.startswith("#"))
