"""Architectures that this engine does not serve are refused with the engine that does."""

from __future__ import annotations

import pytest

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.architectures import (
    ARCHITECTURES,
    VLLM_SERVES_IT,
    family_of,
    vllm_architectures,
)
from pdserve_engines.torch.model_loader.families import FAMILIES


def refusal(names: object) -> str:
    with pytest.raises(UnsupportedCheckpoint) as error:
        family_of({"architectures": names})
    return error.value.message


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "DeepseekV3ForCausalLM", "WhaleForCausalLM"])
def test_a_refusal_names_the_engine_that_serves_it(name: str) -> None:
    message = refusal([name])
    assert f"architecture {name} is not supported by the torch engine" in message
    assert (VLLM_SERVES_IT in message) == (name != "WhaleForCausalLM")
    assert ("it serves LlamaForCausalLM, " in message) == (name == "WhaleForCausalLM")


@pytest.mark.parametrize("names", [None, []])
def test_no_architecture_is_named_as_such(names: object) -> None:
    assert "architecture none is not supported" in refusal(names)


def test_one_known_name_among_others_is_enough() -> None:
    assert family_of({"architectures": ["Unheard", "Qwen3ForCausalLM"]}) == "qwen3"


def test_every_family_has_a_reader() -> None:
    assert set(ARCHITECTURES.values()) == set(FAMILIES)


def test_what_this_engine_serves_vllm_serves_too() -> None:
    """So an error may send a model with an unsupported setting there."""
    assert set(ARCHITECTURES) <= vllm_architectures()
