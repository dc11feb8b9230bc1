"""Settings of actuators: kinds, refused flags, and the command of a worker."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from pdserve.errors import ActuatorDenied, ConfigError
from pdserve.planner.actuators import ACTUATORS, read_actuator
from pdserve.planner.actuators.settings import (
    CommandKind,
    Home,
    find_kind,
    kinds_of,
    read_kinds,
    worker_command,
)

SLURM: dict[str, Any] = {"type": "slurm", "directory": "/shared", "kinds": {"gpu": {"slots": 2}}}


def test_kinds_are_those_of_the_port() -> None:
    kinds = read_kinds({"kinds": {"gpu": {"slots": 2, "price": 3}}}, CommandKind, "f")
    (kind,) = kinds_of("slurm", kinds)
    assert (kind.name, kind.actuator, kind.slots, kind.price) == ("gpu", "slurm", 2, 3.0)


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (None, "no kind of worker: add a table"),
        ({}, "no kind of worker"),
        ({"a b": {}}, "kind 'a b': a name has 1 to 32"),
        ({"a" * 33: {}}, "a name has 1 to 32"),
        ({"gpu": {"slot": 1}}, r"f kinds\.gpu: 'slot' is unknown; did you mean 'slots'"),
        ({"gpu": {"slots": -1}}, "Expected `int` >= 0"),
        ({"gpu": {"slots": 10**30}}, "Expected `int` <= 1000000"),
        ({"gpu": {"price": inf}}, "Expected `float` < 1000000000"),
        ({"gpu": 1}, r"kinds\.gpu: must be a table"),
    ],
)
def test_kinds_that_cannot_be(kinds: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_kinds({"kinds": kinds}, CommandKind, "f")


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(ActuatorDenied, match="no kind 'gqu'; did you mean 'gpu'"):
        find_kind({"gpu": CommandKind()}, "gqu")


def test_a_workers_command_ends_with_what_the_actuator_decides() -> None:
    home = Home("prod", ("--join=h:1",))
    command = worker_command("pdserve", "decode", "7f", home, ["--model=m"], ["--engine=sim"])
    assert command[:4] == ["pdserve", "--join=h:1", "--model=m", "--engine=sim"]
    assert command[4:] == ["--role=worker", "--mode=decode", "--change=7f"]


def test_each_actuator_has_a_name() -> None:
    kind, config = read_actuator(SLURM, "f")
    assert kind is ACTUATORS["slurm"]
    assert kind.make(config, Home("prod")).name == "slurm"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"type": "slrum"}, "type 'slrum' is unknown; did you mean 'slurm'"),
        ({"type": 1}, "type is missing: use one of"),
        ({"directory": "logs"}, "directory must be an absolute path"),
        ({"programm": "x"}, "'programm' is unknown; did you mean 'program'"),
        ({"worker": ["--role=router"]}, "leave --role out: the actuator sets it"),
        ({"kinds": {"a": {"worker": ["--change", "x"]}}}, r"kinds\.a: leave --change out"),
        ({"kinds": {"a": {"flags": ["--array=1-9"]}}}, "leave --array out"),
        ({"worker": ["--model=a\0b"]}, r"--model=a\\x00b has a NUL character"),
    ],
)
def test_tables_that_cannot_be(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_actuator(SLURM | more, "f")


def test_a_table_is_needed() -> None:
    with pytest.raises(ConfigError, match="type is missing"):
        read_actuator(None, "f")
