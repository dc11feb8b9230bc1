"""The bundled model: its corpus is honest, its files load, and it answers what it was taught."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from examples.bundled_model.augment import Augmenter
from examples.bundled_model.qa import Corpus, load, normalise

ARTEFACT = Path(__file__).parents[2] / "pdserve" / "bundled"
LIMIT = 8 * 1024 * 1024


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load()


@pytest.fixture(scope="module")
def judge() -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from examples.bundled_model.judge import Judge

    return Judge(ARTEFACT)


def test_corpus_has_enough_pairs_and_phrasings(corpus: Corpus) -> None:
    assert len(corpus.pairs) >= 150
    assert len({pair.id for pair in corpus.pairs}) == len(corpus.pairs)
    assert min(len(pair.phrasings) for pair in corpus.pairs) >= 5
    assert min(len(pair.held_out) for pair in corpus.pairs) >= 1
    assert max(len(pair.answer.split()) for pair in corpus.pairs) <= 60


def test_a_question_belongs_to_one_pair(corpus: Corpus) -> None:
    for pair in corpus.pairs:
        for question in pair.phrasings:
            assert corpus.owner[normalise(question)] == pair.id, question


def test_no_held_out_phrasing_is_trained(corpus: Corpus) -> None:
    assert corpus.forbidden.isdisjoint(corpus.owner)
    augmenter, rng = Augmenter(corpus), random.Random(7)
    drawn = {normalise(augmenter.question(p, rng)) for p in corpus.pairs for _ in range(25)}
    assert len(drawn) > 2000
    assert corpus.forbidden.isdisjoint(drawn)


def test_artefact_is_small() -> None:
    assert sum(path.stat().st_size for path in ARTEFACT.iterdir()) <= LIMIT


@pytest.mark.parametrize("pair_id", ["what-is-pdserve", "roles", "block"])
def test_artefact_answers(judge: Any, corpus: Corpus, pair_id: str) -> None:
    pair = corpus.by_id(pair_id)
    for question in pair.phrasings[:1]:
        assert judge.answer([{"role": "user", "content": question}]) == pair.answer


def test_tokenizer_round_trips(judge: Any) -> None:
    text = "naïve café — 你好, привет 🙂\n\ttabs, `code` and \x00 bytes"
    ids = judge.tokenizer.encode(text, add_special_tokens=False)
    assert judge.tokenizer.decode(ids) == text


def test_template_takes_system_turns_and_parts(judge: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "bye"},
    ]
    text = judge.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_training_starts_to_learn(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from examples.bundled_model.train import parse, train

    options = parse(
        ["--out", str(tmp_path), "--steps", "12", "--small", "--hidden", "64", "--layers", "1"]
    )
    losses = train(options)
    assert len(losses) == 12
    assert sum(losses[-3:]) < sum(losses[:3])
    assert (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "tokenizer.json").exists()
