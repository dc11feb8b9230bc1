"""Scores of classification heads against `transformers`: stored ones, and those made of the output
layer's rows; and what is refused."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers

from pdserve import accel
from pdserve.clock import ManualClock
from pdserve.engine_core.engine_loader import load_core
from pdserve.errors import ConfigError, InvalidRequest, UnsupportedCheckpoint
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.inline_engine import InlineEngine
from pdserve.token_ids import token_ids
from tests.engines.torch.checkpoints import POSITIONS, TINY, VOCAB, checkpoint
from tests.engines.torch.driver import spec
from tests.text import builders

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.messages.engine import EngineCapabilities

BLOCK = 8
KERNELS = ("torch", "native") if accel.NATIVE else ("torch",)
TRUE, FALSE = 20, 30


def prompts() -> list[list[int]]:
    """Whole, in chunks that end at, before and behind a block's border, and of a single token."""
    random = np.random.default_rng(5)
    return [random.integers(0, VOCAB, n).tolist() for n in (1, 2, BLOCK, 31, 90)]


def wants(prompt: list[int], **fields: Any) -> GenerateRequest:
    given: dict[str, Any] = {"pooling": "last", "classify": True} | fields
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids(prompt),
        sampling=SamplingParams(max_tokens=1),
        **given,
    )


def scored(directory: Path, **options: str) -> Any:
    """An engine over the checkpoint, and its capabilities."""
    engine = InlineEngine(
        load_core("torch", ManualClock()),
        spec(
            directory,
            block_size=BLOCK,
            kv_memory=1 << 22,
            max_batch_tokens=11,
            max_sequences=4,
            options=options,
        ),
    )
    return engine


def vectors(engine: InlineEngine, given: list[list[int]]) -> list[np.ndarray]:
    ledgers = [engine.submit(wants(prompt)) for prompt in given]
    engine.run()
    found = []
    for ledger in ledgers:
        assert ledger.error is None, ledger.error
        finish = ledger.finishes[0]
        assert finish is not None
        found.append(np.frombuffer(finish.embedding, "<f4").astype(np.float64))
    return found


def classifier(name: str, labels: int, bias: bool = False) -> Any:
    """A random model of the family with a head, as `transformers` makes it."""
    tiny = TINY[name]
    torch.manual_seed(3)
    config = tiny.config()
    config.num_labels = labels
    config.pad_token_id = 0
    kind = getattr(transformers, f"{tiny.family}ForSequenceClassification")
    model = kind(config)
    if bias:
        model.score = torch.nn.Linear(config.hidden_size, labels)
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            if each.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.25)
    return model.eval()


@torch.inference_mode()
def oracle(model: Any, prompt: list[int]) -> np.ndarray:
    # Without padding, the last token is pooled whatever its id.
    hidden = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
    found: np.ndarray = model.score(hidden).double().numpy()
    return found


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("name", "labels", "bias"),
    [("qwen3", 1, False), ("llama", 1, True), ("qwen2", 3, False), ("mistral", 1, False)],
)
def test_logits_of_a_stored_head_are_those_of_transformers(
    tmp_path: Path, name: str, labels: int, bias: bool, kernels: str
) -> None:
    model = classifier(name, labels, bias)
    model.save_pretrained(tmp_path)
    engine = scored(tmp_path, kernels=kernels)
    given = prompts()
    for prompt, found in zip(given, vectors(engine, given), strict=True):
        assert found == pytest.approx(oracle(model, prompt), abs=1e-4)
    whole = model(torch.tensor([given[3]])).logits[0].detach().double().numpy()
    assert vectors(engine, [given[3]])[0] == pytest.approx(whole, abs=1e-4)
    told: EngineCapabilities = engine.capabilities
    assert (told.num_labels, "classify" in told.features) == (labels, True)
    said = engine.submit(
        GenerateRequest(
            request_id="t", model="m", prompt=token_ids([5]), sampling=SamplingParams(max_tokens=1)
        )
    )
    engine.run()
    assert isinstance(said.error, InvalidRequest), "a classifier has no output layer"
    assert engine.close() == 0


def named_tokens(directory: Path, **ids: Any) -> None:
    """As sentence-transformers saves a reranker that is a language model."""
    kinds = {"": "base.modules.transformer.Transformer"}
    kinds["1_LogitScore"] = "cross_encoder.modules.logit_score.LogitScore"
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_LogitScore").mkdir()
    (directory / "1_LogitScore/config.json").write_text(json.dumps(ids))


@pytest.fixture
def language_model(tmp_path: Path) -> tuple[Path, Any]:
    source, model = checkpoint("qwen3")
    shutil.copytree(source, tmp_path / "model")
    return tmp_path / "model", model


@torch.inference_mode()
def logits(model: Any, prompt: list[int]) -> np.ndarray:
    found: np.ndarray = model(torch.tensor([prompt])).logits[0, -1].double().numpy()
    return found


def expected(model: Any, prompt: list[int], both: bool) -> float:
    last = logits(model, prompt)
    return float(last[TRUE] - last[FALSE] if both else last[TRUE])


@pytest.mark.parametrize("both", [True, False])
def test_the_difference_of_two_logits_is_a_score(
    language_model: tuple[Path, Any], both: bool
) -> None:
    directory, model = language_model
    named_tokens(directory, true_token_id=TRUE, false_token_id=FALSE if both else None)
    engine = scored(directory)
    given = prompts()
    for prompt, found in zip(given, vectors(engine, given), strict=True):
        assert found == pytest.approx([expected(model, prompt, both)], abs=1e-4)
    said = engine.submit(
        GenerateRequest(
            request_id="t", model="m", prompt=token_ids(given[2]),
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
        )
    )  # fmt: skip
    engine.run()
    assert said.tokens[0] == [int(logits(model, given[2]).argmax())], "it generates text, too"
    assert engine.close() == 0


def test_an_option_names_the_tokens(language_model: tuple[Path, Any]) -> None:
    directory, model = language_model
    tokenizer = builders.byte_level()
    tokenizer.save(str(directory / "tokenizer.json"))
    names = [tokenizer.id_to_token(each) for each in (FALSE, TRUE)]
    engine = scored(directory, classifier_from_token=",".join(map(str, names)))
    prompt = prompts()[3]
    assert vectors(engine, [prompt])[0] == pytest.approx([expected(model, prompt, True)], abs=1e-4)
    assert engine.close() == 0
    with pytest.raises(ConfigError, match="'no such token' is no token of the vocabulary"):
        loaded(directory, classifier_from_token="no such token")


def test_a_tied_output_layer_has_the_rows_as_well(tmp_path: Path) -> None:
    source, model = checkpoint("qwen2")
    assert model.config.tie_word_embeddings
    shutil.copytree(source, tmp_path / "model")
    named_tokens(tmp_path / "model", true_token_id=TRUE, false_token_id=FALSE)
    engine = scored(tmp_path / "model")
    prompt = prompts()[4]
    assert vectors(engine, [prompt])[0] == pytest.approx([expected(model, prompt, True)], abs=1e-4)
    assert engine.close() == 0


def test_heads_are_told_apart_by_workers(tmp_path: Path) -> None:
    """Workers of one served model score alike."""
    hashes = []
    source, _ = checkpoint("qwen3")
    for true in (None, TRUE, TRUE + 1):
        directory = tmp_path / str(true)
        shutil.copytree(source, directory)
        if true is not None:
            named_tokens(directory, true_token_id=true)
        hashes.append(loaded(directory).compat_hash)
    assert len(set(hashes)) == 3


def loaded(directory: Path, **options: str) -> EngineCapabilities:
    core = load_core("torch", ManualClock())
    try:
        return core.load(spec(directory, options=options), lambda progress: None)
    finally:
        core.close()


def test_a_prompt_may_fill_the_whole_context(tmp_path: Path) -> None:
    model = classifier("qwen3", 1)
    model.save_pretrained(tmp_path)
    engine = scored(tmp_path)
    prompt = (prompts()[4] * 3)[:POSITIONS]
    assert vectors(engine, [prompt])[0] == pytest.approx(oracle(model, prompt), abs=1e-4)
    assert engine.close() == 0


def test_a_model_without_a_head_refuses() -> None:
    engine = scored(checkpoint("qwen3")[0])
    ledger = engine.submit(wants([5, 6]))
    engine.run()
    assert isinstance(ledger.error, InvalidRequest)
    assert "no classification head" in ledger.error.message
    assert "classify" not in engine.capabilities.features
    assert engine.close() == 0


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = classifier("qwen3", 1)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has a classification head"):
        loaded(tmp_path, classifier_from_token="yes")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "score.weight": torch.zeros(1, 5)}, file)
    with pytest.raises(UnsupportedCheckpoint, match=r"score\.weight has shape \[1, 5\]"):
        loaded(tmp_path)
    save_file({**tensors, "score.bias": torch.zeros(3)}, file)
    with pytest.raises(UnsupportedCheckpoint, match=r"score\.bias has shape \[3\], expected \[1\]"):
        loaded(tmp_path)
    del tensors["score.weight"]
    save_file(tensors, file)
    with pytest.raises(UnsupportedCheckpoint, match=r"score\.weight.* is missing"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ({"true_token_id": VOCAB}, f"no token {VOCAB}"),
        ({"true_token_id": -1}, "must be token ids"),
        ({"false_token_id": 5}, "must be token ids"),
        ([], "holds no JSON object"),
    ],
)
def test_broken_files_are_refused(language_model: tuple[Path, Any], ids: Any, words: str) -> None:
    directory, _ = language_model
    named_tokens(directory)
    (directory / "1_LogitScore/config.json").write_text(json.dumps(ids))
    with pytest.raises(UnsupportedCheckpoint, match=words):
        loaded(directory)


@pytest.mark.parametrize("value", ["a,b,c", "a,", "a,a"])
def test_other_values_of_the_option_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="as in no,yes"):
        loaded(checkpoint("qwen3")[0], classifier_from_token=value)


def test_scaled_logits_give_no_head(tmp_path: Path) -> None:
    source, _ = checkpoint("gemma3")
    shutil.copytree(source, tmp_path / "model")
    named_tokens(tmp_path / "model", true_token_id=TRUE)
    with pytest.raises(ConfigError, match="output layer of a gemma3 model"):
        loaded(tmp_path / "model")
