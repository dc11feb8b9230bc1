"""Slots and kinds as operators write them."""

from __future__ import annotations

import pytest

from pdserve.agent.config import (
    AgentConfig,
    parse_slots,
    parse_workers,
    show_slots,
    show_workers,
)
from pdserve.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("gpu=0,1", {"gpu": ("0", "1")}),
        ("gpu=0", {"gpu": ("0",)}),
        ("cpu=x3", {"cpu": ("", "", "")}),
        ("gpu=0+1,2+3", {"gpu": ("0,1", "2,3")}),
        ("a=0,0; b=x1", {"a": ("0", "0"), "b": ("",)}),
        ("a=GPU-8932f937\nb=MIG-GPU-1/0/1\n", {"a": ("GPU-8932f937",), "b": ("MIG-GPU-1/0/1",)}),
    ],
)
def test_slots(text: str, slots: dict[str, tuple[str, ...]]) -> None:
    assert parse_slots(text) == slots
    assert parse_slots(show_slots(slots)) == slots


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu", "form GROUP=SLOTS"),
        ("gpu:0,1", "form GROUP=SLOTS"),
        ("a/b=x1", "form GROUP=SLOTS"),
        ("cpu=x0", "1 to 256 slots"),
        ("cpu=x999", "1 to 256 slots"),
        ("gpu=0,,1", "'' is no device"),
        ("gpu=", "'' is no device"),
        ("gpu=0;gpu=1", "there twice"),
    ],
)
def test_slots_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_slots(text)


def test_workers() -> None:
    text = "gpu=--model=/m/a --engine sim\ngpu/big='--lora=a b=/x' --no-prefix-cache"
    workers = parse_workers(text)
    assert workers == {
        "gpu": ("--model=/m/a", "--engine", "sim"),
        "gpu/big": ("--lora=a b=/x", "--no-prefix-cache"),
    }
    assert parse_workers(show_workers(workers)) == workers


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--model=/m/a", "form KIND=FLAGS"),
        ("gpu", "form KIND=FLAGS"),
        ("gpu='--model", "cannot be read"),
        ("gpu=--a=1\ngpu=--b=2", "there twice"),
    ],
)
def test_workers_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_workers(text)


def test_every_group_is_a_kind() -> None:
    config = AgentConfig(
        slots={"gpu": ("0",), "cpu": ("",)}, workers={"gpu/a": ("--model=/a",), "cpu": ("--x",)}
    )
    config.validate()
    assert config.kinds() == {"gpu": (), "cpu": ("--x",), "gpu/a": ("--model=/a",)}


def test_a_kind_without_slots_is_named_with_the_nearest_group() -> None:
    with pytest.raises(ConfigError, match="no slots 'gpus', did you mean 'gpu'"):
        AgentConfig(slots={"gpu": ("0",)}, workers={"gpus/a": ()}).validate()
    with pytest.raises(ConfigError, match="add it to agent-slots"):
        AgentConfig(slots={"x": ("",)}, workers={"gpu": ()}).validate()
    with pytest.raises(ConfigError, match="give --agent-slots"):
        AgentConfig().validate()
