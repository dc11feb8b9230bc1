"""Rotary embeddings that depend on the context, turn a part of a head, or pair neighbours."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.rope_config import RopeConfig, max_positions, parse_rope

LONG = {"short_factor": [1.0, 2.0], "long_factor": [3, 4.5]}
POSITIONS = {"max_position_embeddings": 512}


def parsed(family: Any = "phi3", head_dim: int = 4, **raw: Any) -> RopeConfig:
    return parse_rope(POSITIONS | raw, family, head_dim)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_longrope_has_several_names(kind: str) -> None:
    rope = parsed(rope_scaling={"type": kind} | LONG, original_max_position_embeddings=64)
    assert (rope.kind, rope.original_max_positions, rope.factor) == ("longrope", 64, 8.0)
    assert rope.longrope is not None
    assert rope.longrope.short == (1.0, 2.0)
    assert rope.longrope.long == (3.0, 4.5)
    assert rope.longrope.attention_factor == math.sqrt(1 + math.log(8) / math.log(64))


def test_longrope_takes_factors_that_are_given() -> None:
    given = {"attention_factor": 1.25, "factor": 32.0, "original_max_position_embeddings": 128}
    rope = parsed(rope_parameters={"rope_type": "longrope"} | LONG | given)
    assert (rope.original_max_positions, rope.factor) == (128, 32.0)
    assert rope.longrope is not None
    assert rope.longrope.attention_factor == 1.25
    assert parsed(rope_scaling={"type": "su"} | LONG).longrope == replace(
        rope.longrope, attention_factor=1.0
    )


@pytest.mark.parametrize(
    ("tokens", "factors"), [(1, (1.0, 2.0)), (64, (1.0, 2.0)), (65, (3.0, 4.5)), (512, (3.0, 4.5))]
)
def test_longrope_turns_by_the_context_that_is_served(
    tokens: int, factors: tuple[float, ...]
) -> None:
    rope = parsed(rope_scaling={"type": "su"} | LONG, original_max_position_embeddings=64)
    chosen = rope.for_context(tokens)
    assert chosen.longrope is not None
    assert chosen.longrope.short == chosen.longrope.long == factors
    assert chosen.for_context(tokens) == chosen


def test_dynamic_turns_by_the_context_that_is_served() -> None:
    raw = POSITIONS | {"rope_scaling": {"type": "dynamic", "factor": 3.0}}
    rope = parse_rope(raw, "llama", 16)
    assert max_positions(raw, rope) == 1536
    assert rope.for_context(100) == rope.for_context(512), "nothing is stretched"
    assert len({rope.for_context(tokens) for tokens in (512, 513, 1536)}) == 3


def test_queries_grow_only_beyond_the_original_context() -> None:
    yarn = {"type": "yarn", "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}
    rope = parsed("mistral", rope_parameters=yarn)
    assert rope.query_beta == 0.1
    assert rope.for_context(65) == rope
    assert rope.for_context(64).query_beta == 0.0


def test_other_kinds_do_not_depend_on_the_context() -> None:
    rope = parsed("llama", rope_scaling={"type": "linear", "factor": 2.0})
    assert rope.for_context(7) == rope


@pytest.mark.parametrize(
    ("family", "head_dim", "raw", "order"),
    [
        ("llama", 6, {}, None),
        ("phi3", 6, {"partial_rotary_factor": 1.0}, None),
        ("phi3", 8, {"partial_rotary_factor": 0.5}, [0, 1, 4, 5, 2, 3, 6, 7]),
        ("phi3", 8, {"rope_parameters": {"partial_rotary_factor": 0.5}}, [0, 1, 4, 5, 2, 3, 6, 7]),
        ("glm4", 8, {"partial_rotary_factor": 0.5}, [0, 2, 4, 5, 1, 3, 6, 7]),
        ("cohere2", 6, {}, [0, 2, 4, 1, 3, 5]),
    ],
)
def test_pairs_are_brought_into_one_order(
    family: Any, head_dim: int, raw: dict[str, Any], order: list[int] | None
) -> None:
    assert parsed(family, head_dim, **raw).head_order(head_dim) == order


@pytest.mark.parametrize(
    ("family", "raw", "named"),
    [
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ("phi3", {"partial_rotary_factor": 0.25}, "0.25 of a head of 4 dimensions"),
        ("phi3", {"partial_rotary_factor": 0}, "no even number"),
        ("phi3", {"partial_rotary_factor": 2}, "no even number"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "short_factor must be a list of 2"),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope"} | LONG | {"long_factor": [1]}},
            "long_factor must be a list of 2",
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope"} | LONG | {"long_factor": [1, "x"]}},
            "long_factor must be a number",
        ),
        ("mistral", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "only in yarn of Mistral"),
        (
            "llama",
            {"rope_parameters": {"type": "yarn", "llama_4_scaling_beta": 0.1}},
            "only in yarn of Mistral",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(family: Any, raw: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedCheckpoint) as error:
        parsed(family, **raw)
    assert named in error.value.message
