"""Conversations as rows of token ids with a weight per token.

A row is one conversation of random turns, cut at its length. Long rows teach the model to answer
the last question at any position up to the end of its context, whatever was said before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from examples.bundled_model.layout import BOS, END, START
from examples.bundled_model.qa import PREVIOUS, Corpus, Pair

if TYPE_CHECKING:
    import random

    from tokenizers import Tokenizer

    from examples.bundled_model.augment import Augmenter

QUESTION_WEIGHT = 0.1
"""Questions teach a little about words; answers are what is wanted."""


@dataclass(frozen=True)
class Shape:
    """One form of batch: `rows` conversations of `length` tokens, drawn with chance `share`."""

    rows: int
    length: int
    share: float


SHAPES = (Shape(32, 128, 0.54), Shape(10, 400, 0.38), Shape(2, 2048, 0.08))


class Row:
    """Token ids and loss weights under construction."""

    def __init__(self, tokenizer: Tokenizer, noisy: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._noisy = noisy
        self.ids: list[int] = []
        self.weights: list[float] = []

    def add(self, text: str, weight: float, *, noisy: bool = False) -> None:
        """Append the tokens of `text`; `noisy` splits some words differently (BPE dropout)."""
        tokenizer = self._noisy if noisy else self._tokenizer
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        self.ids += ids
        self.weights += [weight] * len(ids)

    def turn(self, role: str, content: str, weight: float, *, noisy: bool = False) -> None:
        """Append one message as the chat template writes it; its end mark counts as content."""
        self.add(f"{START}{role}\n", 0.0)
        self.add(content, weight, noisy=noisy)
        self.add(END, weight)
        self.add("\n", 0.0)


@dataclass(frozen=True)
class RowMaker:
    """Draws rows from the corpus."""

    corpus: Corpus
    augmenter: Augmenter
    tokenizer: Tokenizer
    noisy: Tokenizer
    """A tokenizer of the same vocabulary with BPE dropout."""

    def row(self, length: int, rng: random.Random) -> tuple[list[int], list[float]]:
        """One conversation (rarely: plain text) of exactly `length` tokens."""
        row = Row(self.tokenizer, self.noisy)
        row.add(BOS, 0.0)
        if rng.random() < 0.06:
            self._plain(row, length, rng)
        else:
            self._conversation(row, length, rng)
        return row.ids[:length], row.weights[:length]

    def _conversation(self, row: Row, length: int, rng: random.Random) -> None:
        if rng.random() < 0.3:
            row.turn("system", self._system(length, rng), 0.0, noisy=rng.random() < 0.3)
        previous: str | None = None
        while len(row.ids) < length:
            pair = self._draw(rng)
            previous = pair.reply(previous)
            question = self.augmenter.question(pair, rng)
            row.turn("user", question, QUESTION_WEIGHT, noisy=rng.random() < 0.3)
            row.turn("assistant", previous, 1.0)

    def _plain(self, row: Row, length: int, rng: random.Random) -> None:
        """Questions and answers without the template, for those who send plain prompts."""
        while len(row.ids) < length:
            pair = self._draw(rng)
            if pair.answer == PREVIOUS:
                continue
            if rng.random() < 0.5:
                row.add(self.augmenter.question(pair, rng) + "\n", QUESTION_WEIGHT)
            row.add(pair.answer, 1.0)
            row.add(END + BOS, 1.0)

    def _system(self, length: int, rng: random.Random) -> str:
        message = rng.choice(self.corpus.frames.system)
        if length > 200 and rng.random() < 0.2:
            others = rng.choices(self.corpus.pairs, k=rng.randint(1, length // 100))
            message += " " + " ".join(pair.answer for pair in others)
        return message

    def _draw(self, rng: random.Random) -> Pair:
        weights = [pair.weight for pair in self.corpus.pairs]
        return rng.choices(self.corpus.pairs, weights)[0]
