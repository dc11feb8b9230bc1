"""What a model's directory says about vectors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pdserve.errors import ConfigError
from pdserve.worker.card import read_card
from pdserve.worker.pooling import PoolerConfig, read_pooler_config, read_score_activation
from tests.worker.test_card import CAPABILITIES

if TYPE_CHECKING:
    from pathlib import Path

MAKES = replace(CAPABILITIES, features=("bans", "embeddings"), embedding_size=48)


def write(
    path: Path, pooling: dict[str, Any] | None, *more: str, config: dict[str, Any] | None = None
) -> Path:
    """A model's directory as sentence-transformers leaves it; `more`: kinds of further modules."""
    (path / "config.json").write_text(json.dumps(config or {}))
    (path / "tokenizer.json").write_text('{"added_tokens": []}')
    kinds = ["Transformer", *(["Pooling"] if pooling is not None else []), *more]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if kind == "Transformer" else f"{index}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return path


def modes(**set_modes: bool) -> dict[str, Any]:
    """`1_Pooling/config.json` with every mode that is not named off."""
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    return {
        "word_embedding_dimension": 48,
        **{f"pooling_mode_{name}": set_modes.get(name, False) for name in names},
        "include_prompt": True,
    }


@pytest.mark.parametrize(
    ("pooling", "more", "found"),
    [
        (modes(mean_tokens=True), (), PoolerConfig("mean")),
        (modes(lasttoken=True), ("Normalize",), PoolerConfig("last", normalize=True)),
        ({"pooling_mode": "lasttoken"}, ("Normalize",), PoolerConfig("last", normalize=True)),
        ({"pooling_mode": "mean"}, (), PoolerConfig("mean")),
    ],
)
def test_the_model_says_how_it_pools(
    tmp_path: Path, pooling: dict[str, Any], more: tuple[str, ...], found: PoolerConfig
) -> None:
    path = write(tmp_path, pooling, *more)
    assert read_pooler_config(path, "auto") == found
    assert read_pooler_config(path, "none") == PoolerConfig()
    assert read_pooler_config(path, "last") == PoolerConfig("last", found.normalize)


@pytest.mark.parametrize(
    ("pooling", "more", "words"),
    [
        (modes(cls_token=True), (), "pools by cls_token"),
        (modes(mean_tokens=True, max_tokens=True), (), "pools by mean_tokens and max_tokens"),
        (modes(), (), "pools by nothing"),
        ({"pooling_mode": "weightedmean"}, (), "pools by weightedmean"),
        (modes(mean_tokens=True), ("Dense",), "a Dense step"),
        (None, (), "one folder of pooling"),
    ],
)
def test_what_no_engine_does_is_named_with_the_remedy(
    tmp_path: Path, pooling: dict[str, Any] | None, more: tuple[str, ...], words: str
) -> None:
    path = write(tmp_path, pooling, *more)
    with pytest.raises(ConfigError, match=words) as caught:
        read_pooler_config(path, "auto")
    assert "--pooling=none" in caught.value.message
    assert read_pooler_config(path, "mean").pooling == "mean"


def test_broken_files_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, modes(mean_tokens=True))
    (path / "1_Pooling/config.json").unlink()
    with pytest.raises(ConfigError, match=r"1_Pooling/config\.json is missing"):
        read_pooler_config(path, "auto")
    (path / "modules.json").write_text('[{"path": "../../elsewhere", "type": "x.Pooling"}]')
    with pytest.raises(ConfigError, match="one folder"):
        read_pooler_config(path, "auto")
    (path / "modules.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="not a list of modules"):
        read_pooler_config(path, "auto")
    (path / "modules.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_pooler_config(path, "auto")


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({}, ()),
        ({"is_matryoshka": True}, (0,)),
        ({"is_matryoshka": True, "matryoshka_dimensions": [32, 16]}, (16, 32)),
        ({"matryoshka_dimensions": [-1]}, ()),
    ],
)
def test_the_sizes_that_vectors_may_be_cut_to(
    tmp_path: Path, config: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    path = write(tmp_path, modes(lasttoken=True), config=config)
    assert read_pooler_config(path, "auto").dimensions == sizes


def test_a_card_says_so_if_model_and_engine_agree(tmp_path: Path) -> None:
    path = write(tmp_path, modes(lasttoken=True), "Normalize", config={"is_matryoshka": True})
    card = read_card(path, ("m",), MAKES)
    assert (card.pooling, card.normalize, card.embedding_size) == ("last", True, 48)
    assert (card.features, card.dimensions) == (("bans", "embeddings"), (0,))
    none = read_card(path, ("m",), MAKES, pooling="none")
    assert (none.pooling, none.embedding_size, none.features) == ("", 0, ("bans",))
    other = read_card(path, ("m",), CAPABILITIES)
    assert (other.pooling, other.embedding_size, other.features) == ("", 0, ())
    with pytest.raises(ConfigError, match="'instant' cannot compute embeddings"):
        read_card(path, ("m",), CAPABILITIES, pooling="last")


def test_a_classifiers_files_say_nothing_of_vectors(tmp_path: Path) -> None:
    """A reranker's list of steps has no pooling, which is an error for an embedding model."""
    path = write(tmp_path, None, "LogitScore")
    judges = replace(MAKES, features=("embeddings", "classify"), num_labels=1)
    card = read_card(path, ("m",), judges)
    assert (card.pooling, card.embedding_size, card.features) == ("", 0, ("classify",))
    assert (card.num_labels, card.score_activation) == (1, "sigmoid")
    several = read_card(path, ("m",), replace(judges, num_labels=3))
    assert (several.num_labels, several.score_activation) == (3, "")
    both = read_card(path, ("m",), judges, pooling="last")
    assert (both.pooling, both.features) == ("last", ("embeddings", "classify"))
    with pytest.raises(ConfigError, match="LogitScore"):
        read_card(path, ("m",), MAKES)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, "sigmoid"),
        ({"config.json": {"sentence_transformers": {"activation_fn": "torch.nn.Identity"}}}, "id"),
        ({"config.json": {"sbert_ce_default_activation_function": "torch.nn.Sigmoid"}}, "sigmoid"),
        ({"config_sentence_transformers.json": {"activation_fn": "torch.nn.Identity"}}, "id"),
        (
            {
                "config_sentence_transformers.json": {"activation_fn": "torch.nn.Identity"},
                "config.json": {"sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}},
            },
            "id",
        ),
        ({"config_sentence_transformers.json": {"activation_fn": "torch.nn.Tanh"}}, "error"),
    ],
)  # fmt: skip
def test_a_rerankers_files_say_what_a_score_is(
    tmp_path: Path, files: dict[str, Any], found: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    if found == "error":
        with pytest.raises(ConfigError, match=r"scores through torch\.nn\.Tanh"):
            read_score_activation(tmp_path)
    else:
        assert read_score_activation(tmp_path).startswith(found)


def test_a_model_that_says_nothing_makes_none_unless_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": []}')
    assert read_card(tmp_path, ("m",), MAKES).features == ("bans",)
    card = read_card(tmp_path, ("m",), MAKES, pooling="mean")
    assert (card.pooling, card.normalize, card.features) == ("mean", False, MAKES.features)
