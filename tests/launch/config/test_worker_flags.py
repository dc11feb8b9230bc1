"""Command lines of workers that an agent starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.cli.serve import read_flags
from pdserve.errors import ConfigError
from pdserve.launch.config.resolve import resolve
from pdserve.launch.config.worker_flags import (
    as_arguments,
    check_worker_flags,
    kind_flags,
    shared_flags,
)

if TYPE_CHECKING:
    from pathlib import Path


def test_flags_of_a_kind_in_every_form() -> None:
    words = ("--model=/m/a", "--engine", "sim", "--no-prefix-cache", "--drain-timeout=5s")
    options = ("--engine-option", "blocks=9", "--engine-option=content=on")
    flags = kind_flags("gpu", (*words, *options))
    assert flags == {
        "model": "/m/a",
        "engine": "sim",
        "prefix-cache": "false",
        "drain-timeout": "5s",
        "engine-option": "blocks=9\ncontent=on\n",
    }
    assert read_flags(list(as_arguments(flags))) == flags


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--modell=/m",), "agent-worker gpu: --modell is unknown, did you mean --model"),
        (("--port=80",), "--port is no option of a worker"),
        (("--agent-slots=x=x1",), "--agent-slots is no option of a worker"),
        (("--mode=prefill",), "--mode is set by the agent"),
        (("--node-name=a",), "--node-name is set by the agent"),
        (("--config=/f",), "--config is set by the agent"),
        (("model",), "'model' is no flag"),
        (("--model",), "--model needs a value"),
        (("--kv-memory=4G",), "agent-worker gpu: --kv-memory"),
        (("--block-size=3",), "agent-worker gpu: block-size 3 is not possible"),
    ],
)
def test_flags_that_cannot_be(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        kind_flags("gpu", words)
    assert says in raised.value.message


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--modell=/m",), "here: --modell is unknown, did you mean --model?"),
        (("--engin", "vllm"), "here: --engin is unknown, did you mean --engine?"),
        (("model",), "here: 'model' is no flag"),
        (("--model",), "here: --model needs a value"),
        (("--kv-memory=4G",), "here: --kv-memory: "),
        (("--engine-option", "blocks"), "here: --engine-option: "),
        (("--drain-timeout", "soon"), "here: --drain-timeout: "),
    ],
)
def test_flags_that_no_command_line_takes(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_worker_flags("here", words)
    assert raised.value.message.startswith(says)


def test_flags_of_another_host_are_not_compared_with_this_one() -> None:
    files = ("--model=/nowhere/m", "--config=/nowhere/f.toml", "--cluster-key-file", "/nowhere/k")
    own = ("--listen=10.0.0.1:0", "--node-name=a", "--metrics-port=0", "--no-prefix-cache")
    options = ("--engine-option=a=1", "--engine-option", "b=2")
    check_worker_flags("here", (*files, *own, *options, "--port=80"))


def test_workers_get_what_concerns_workers_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "pdserve.toml").write_text('kv-memory = "1GiB"\n[agent-slots]\ncpu = "x2"\n')
    given = {
        "role": "agent",
        "agent-worker": "cpu=--engine=instant",
        "metrics-port": "9100",
        "model": "/m/a",
        "policy": "round_robin",
        "listen": "10.0.0.1:7000",
        "join": "h:7700",
        "node-name": "agent-h",
        "change": "7f.2",
        "mode": "prefill",
    }
    config = resolve(given, {"PDSERVE_LOG_FORMAT": "json"}, tmp_path)
    assert config.agent.slots == {"cpu": ("", "")}
    assert shared_flags(config, "10.0.0.1:7000") == {
        "role": "worker",
        "config": "none",
        "log-format": "json",
        "kv-memory": "1GiB",
        "metrics-port": "0",
        "model": "/m/a",
        "listen": "10.0.0.1:0",
        "join": "10.0.0.1:7000,h:7700",
    }
