"""Options of the sim engine, and what it reads of a model."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

import pdserve
from pdserve.errors import ConfigError
from pdserve.messages.engine import EngineSpec
from pdserve_engines.sim.settings import SimOptions, parse_options, read_model
from tests.conformance.test_engines import write_model

BUNDLED = str(Path(pdserve.__file__).parent / "bundled")


def test_every_kind_of_option_is_read():
    options = parse_options(
        {"preset": "h200-8b", "noise": "0.3", "content": "on", "blocks": "7", "load_time": "1"}
    )
    assert options == SimOptions(preset="h200-8b", noise=0.3, content=True, blocks=7, load_time=1.0)
    assert parse_options({}) == SimOptions()


def test_an_unknown_option_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match="no option speed") as caught:
        parse_options({"speed": "2"})
    assert all(field.name in caught.value.message for field in fields(SimOptions))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise", "much"),
        ("noise", "-1"),
        ("slowdown", "inf"),
        ("blocks", "1.5"),
        ("blocks", "-1"),
        ("content", "yes"),
    ],
)
def test_a_value_that_is_none_is_named(name: str, value: str):
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        parse_options({name: value})


def test_an_invented_vocabulary_needs_no_files():
    spec = EngineSpec(engine="sim", model="/nowhere")
    vocabulary = read_model(spec, SimOptions(vocab=32_000))
    assert vocabulary.size == 32_000
    assert len(set(vocabulary.words)) == 256
    assert min(vocabulary.words) >= 4
    assert max(vocabulary.words) < 32_000
    assert read_model(spec, SimOptions(vocab=5)).words == (4,)
    with pytest.raises(ConfigError, match="vocab=4"):
        read_model(spec, SimOptions(vocab=4))


def test_the_bundled_model_lends_its_words():
    vocabulary = read_model(EngineSpec(engine="sim", model=BUNDLED), SimOptions())
    assert vocabulary.size == 1280
    assert vocabulary.max_len == 2048
    assert set(vocabulary.words).isdisjoint(vocabulary.eos_token_ids)


def test_weights_are_not_needed_and_lengths_can_be_set(tmp_path: Path):
    write_model(tmp_path)
    spec = EngineSpec(engine="sim", model=str(tmp_path))
    assert read_model(spec, SimOptions()).max_len == 120
    assert read_model(spec, SimOptions(max_len=100_000)).max_len == 100_000
    with pytest.raises(ConfigError, match="100001 is over --engine-option max_len=100000"):
        read_model(
            EngineSpec(engine="sim", model=str(tmp_path), max_model_len=100_001),
            SimOptions(max_len=100_000),
        )
    with pytest.raises(ConfigError, match=r"over .* limit of 120 .*--engine-option max_len=121"):
        read_model(EngineSpec(engine="sim", model=str(tmp_path), max_model_len=121), SimOptions())


def test_a_directory_without_a_model_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model(EngineSpec(engine="sim", model=str(tmp_path)), SimOptions())
