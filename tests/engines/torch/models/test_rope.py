"""Every kind of rotary embedding against `transformers`, pair by pair."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pdserve.errors import ConfigError, UnsupportedCheckpoint
from pdserve.limits.memory import MemoryBound
from pdserve_engines.torch.model_loader.config import parse_config
from pdserve_engines.torch.models.rope import check_rope, inverse_frequencies, rope_table
from tests.engines.torch.checkpoints import LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE
from tests.engines.torch.model_loader.test_config import LLAMA

# Also settings of published models: they differ in what they say and leave out.
YARNS: list[dict[str, Any]] = [
    {},
    {"factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6},
    {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
    {"mscale": 0.707, "mscale_all_dim": 0.5, "original_max_position_embeddings": 4096},
    {"mscale": 1.0, "mscale_all_dim": 0},
    {"attention_factor": 1.25},
    {"factor": 1.0},
    {"beta_fast": 4, "beta_slow": 4},
]
ROOM = MemoryBound("a test's", 1 << 30, 1 << 20)
ROPES = [LINEAR_ROPE, LLAMA3_ROPE, *(YARN_ROPE | fields for fields in YARNS)]


@pytest.mark.parametrize("length", [100, 512, 513, 2000])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_context_turns_like_a_sequence_of_its_length(kind: str, length: int) -> None:
    """What transformers computes for a sequence that is as long as the context may be."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {"original_max_position_embeddings": 512}
        rope |= {"short_factor": [1 + i / 9 for i in range(8)], "long_factor": [*range(1, 9)]}
    raw = LLAMA | {"head_dim": 16, "rope_parameters": rope}
    theirs = transformers.LlamaConfig(**{k: v for k, v in raw.items() if k != "architectures"})
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"), seq_len=length)
    ours = parse_config(raw).rope.for_context(length)
    torch.testing.assert_close(inverse_frequencies(ours, 16), frequencies, rtol=1e-6, atol=0)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    table = rope_table(parse_config(raw).rope, 16, length)
    torch.testing.assert_close(table[:, 0], angles.cos() * factor, rtol=0, atol=3e-4)
    torch.testing.assert_close(table[:, 1], angles.sin() * factor, rtol=0, atol=3e-4)


def test_dimensions_that_are_not_turned_come_last() -> None:
    raw = LLAMA | {"architectures": ["Phi3ForCausalLM"], "head_dim": 16}
    whole = rope_table(parse_config(raw | {"head_dim": 8}).rope, 8, 20)
    part = rope_table(parse_config(raw | {"partial_rotary_factor": 0.5}).rope, 16, 20)
    assert torch.equal(part[:, :, :4], whole)
    assert torch.equal(part[:, 0, 4:], torch.ones(20, 4))
    assert torch.equal(part[:, 1, 4:], torch.zeros(20, 4))


@pytest.mark.parametrize(("rope", "head_dim"), [*itertools.product(ROPES, (16, 64, 128))])
def test_the_table_is_that_of_transformers(rope: dict[str, Any], head_dim: int) -> None:
    raw = LLAMA | {"head_dim": head_dim, "rope_parameters": rope}
    theirs = transformers.LlamaConfig(**{k: v for k, v in raw.items() if k != "architectures"})
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, torch.device("cpu"))
    ours = parse_config(raw).rope
    torch.testing.assert_close(inverse_frequencies(ours, head_dim), frequencies, rtol=1e-6, atol=0)
    positions = torch.tensor([0, 1, 15, 16, 17, 299])
    angles = torch.outer(positions.float(), frequencies)
    table = rope_table(ours, head_dim, 300)[positions]
    torch.testing.assert_close(table[:, 0], angles.cos() * factor, rtol=0, atol=1e-4)
    torch.testing.assert_close(table[:, 1], angles.sin() * factor, rtol=0, atol=1e-4)


def test_a_table_that_does_not_fit_is_refused_before_it_is_made() -> None:
    rope = parse_config(LLAMA).rope
    check_rope(rope, 64, 1024, ROOM)
    for positions in (1025, 10**12, 10**30):
        with pytest.raises(ConfigError, match=r"1\.0 MiB are free .*set --max-model-len"):
            check_rope(rope, 64, positions, ROOM)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1.0},
        {"rope_type": "default", "rope_theta": 1e-300},
    ],
)
def test_settings_that_give_no_angles_are_refused(rope: dict[str, Any]) -> None:
    parsed = parse_config(LLAMA | {"rope_parameters": rope}).rope
    with pytest.raises(UnsupportedCheckpoint, match=rf"\({rope['rope_type']}\) give no finite"):
        check_rope(parsed, 16, 64, ROOM)
