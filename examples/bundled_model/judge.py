"""The model and the ways to ask it: whole answers in one pass, or token by token.

A case is a question in its conversation with the answer that is wanted. Knows nothing about which
questions are measured; that is `evaluate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.bundled_model.qa import PREVIOUS, Corpus, Pair

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, str]]
BATCH_TOKENS = 8192
SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True)
class Case:
    """One question in its conversation, with the answer that is wanted."""

    pair: str
    messages: Messages
    answer: str


@dataclass(frozen=True)
class Rate:
    """How many cases of one kind were exact."""

    name: str
    exact: int
    cases: int

    @property
    def percent(self) -> float:
        """The rate in percent, with one decimal."""
        return round(100 * self.exact / max(1, self.cases), 1)


class Judge:
    """A loaded model and the two ways to ask it."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.train(False)
        self.model: Any = model

    def prompt(self, messages: Messages) -> list[int]:
        """The tokens of a conversation up to where the answer begins."""
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return list(self.tokenizer.encode(str(text), add_special_tokens=False))

    def wanted(self, case: Case) -> list[int]:
        """The tokens of the wanted answer and its end mark."""
        answer = self.tokenizer.encode(case.answer, add_special_tokens=False)
        return [*answer, int(self.tokenizer.eos_token_id)]

    @torch.inference_mode()
    def exact(self, cases: Sequence[Case]) -> list[bool]:
        """For each case: is every token of the wanted answer the most likely one?"""
        rows = [(self.prompt(case.messages), self.wanted(case)) for case in cases]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]) + len(rows[i][1]))
        verdicts = [False] * len(rows)
        for chunk in _chunks(order, lambda i: len(rows[i][0]) + len(rows[i][1])):
            for i, verdict in zip(chunk, self._exact([rows[i] for i in chunk]), strict=True):
                verdicts[i] = verdict
        return verdicts

    def _exact(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[bool]:
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        # Padding on the right: a causal model never looks at it.
        ids = torch.zeros((len(rows), width), dtype=torch.long)
        for i, (prompt, answer) in enumerate(rows):
            ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        best = self.model(input_ids=ids, use_cache=False).logits.argmax(-1)
        verdicts = []
        for i, (prompt, answer) in enumerate(rows):
            start = len(prompt) - 1
            verdicts.append(best[i, start : start + len(answer)].tolist() == answer)
        return verdicts

    @torch.inference_mode()
    def answer(self, messages: Messages, limit: int = 160) -> str:
        """Decode greedily, token by token."""
        prompt = torch.tensor([self.prompt(messages)])
        output = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=limit,
            do_sample=False,
            temperature=None,
        )
        return str(self.tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True))


def cases(corpus: Corpus, questions: Callable[[Pair], Iterable[str]]) -> list[Case]:
    """One case per question, asked as the first message of a conversation."""
    return [
        Case(pair.id, [{"role": "user", "content": question}], pair.reply(None))
        for pair in corpus.pairs
        for question in questions(pair)
    ]


def with_system(case: Case) -> Case:
    """Returns the case after a system message."""
    system = {"role": "system", "content": SYSTEM}
    return Case(case.pair, [system, *case.messages], case.answer)


def later(case: Case, corpus: Corpus, judge: Judge, tokens: int, rng: random.Random) -> Case:
    """Returns the case after earlier turns that fill about `tokens` tokens."""
    history: Messages = []
    said: str | None = None
    while True:
        pair = rng.choice(corpus.pairs)
        reply = pair.reply(said)
        turn = [
            {"role": "user", "content": rng.choice(pair.phrasings)},
            {"role": "assistant", "content": reply},
        ]
        if said is not None and len(judge.prompt([*history, *turn, *case.messages])) > tokens:
            break
        history, said = [*history, *turn], reply
    wanted = said if corpus.by_id(case.pair).answer == PREVIOUS else case.answer
    return Case(case.pair, [*history, *case.messages], wanted)


def rate(name: str, judge: Judge, group: Sequence[Case]) -> Rate:
    """The rate of exact answers in a group of cases."""
    return Rate(name, sum(judge.exact(group)), len(group))


def _chunks(order: Sequence[int], size: Callable[[int], int]) -> Iterable[list[int]]:
    """Cut indexes, sorted by size, into batches of a bounded number of padded tokens."""
    chunk: list[int] = []
    for i in order:
        if chunk and size(i) * (len(chunk) + 1) > BATCH_TOKENS:
            yield chunk
            chunk = []
        chunk.append(i)
    if chunk:
        yield chunk
