"""Variations of the trained questions, so that the model learns what is asked and not how.

Every variation is checked twice against the held-out questions: before it is decorated and at the
end. What collides with a held-out question, or with another pair's question, is dropped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from examples.bundled_model.qa import OFF_TOPIC, Corpus, Pair, normalise

if TYPE_CHECKING:
    import random

_ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "kr", "bl", "st")
_VOWELS = "aeiou"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_TRIES = 8


@dataclass(frozen=True)
class Augmenter:
    """Draws questions for pairs. All randomness comes from the generator that is passed in."""

    corpus: Corpus

    def question(self, pair: Pair, rng: random.Random) -> str:
        """One question that asks for this pair's answer; often one that is not in the corpus."""
        for _ in range(_TRIES):
            core = self._core(pair, rng)
            if not self._allowed(core, pair):
                continue
            final = self._decorate(core, rng)
            if self._allowed(final, pair):
                return final
        return rng.choice(pair.phrasings)

    def _allowed(self, question: str, pair: Pair) -> bool:
        key = normalise(question)
        return key not in self.corpus.forbidden and self.corpus.owner.get(key, pair.id) == pair.id

    def _core(self, pair: Pair, rng: random.Random) -> str:
        if pair.id == OFF_TOPIC and rng.random() < 0.6:
            return self._off_topic(rng)
        if pair.topics and rng.random() < 0.4:
            return rng.choice(self.corpus.frames.define).format(rng.choice(pair.topics))
        question = rng.choice(pair.phrasings)
        if pair.id != OFF_TOPIC and rng.random() < 0.5:
            question = self._swap(question, pair, rng)
        if pair.id != OFF_TOPIC and rng.random() < 0.12:
            question = _insert_before_mark(question, rng.choice(self.corpus.frames.context))
        return question

    def _off_topic(self, rng: random.Random) -> str:
        frames = self.corpus.frames
        pattern = rng.choice(frames.define if rng.random() < 0.5 else frames.thing_questions)
        return pattern.format(*(self._thing(rng) for _ in range(pattern.count("{}"))))

    def _thing(self, rng: random.Random) -> str:
        if rng.random() < 0.7:
            return rng.choice(self.corpus.frames.things)
        word = "".join(_syllable(rng) for _ in range(rng.randint(2, 4)))
        return rng.choice(("", "a ", "the ", "")) + (word.title() if rng.random() < 0.3 else word)

    def _swap(self, question: str, pair: Pair, rng: random.Random) -> str:
        # A topic is the subject of the question; other words would change the question.
        kept = {word for topic in pair.topics for word in topic.split()}
        for group in rng.sample(self.corpus.frames.swaps, len(self.corpus.frames.swaps)):
            old = next((word for word in group if _contains(question, word)), None)
            if old is None or kept.intersection(group) or rng.random() < 0.4:
                continue
            question = re.sub(_whole(old), rng.choice(group), question, count=1)
        return question

    def _decorate(self, core: str, rng: random.Random) -> str:
        frames = self.corpus.frames
        question = core
        if rng.random() < 0.35:
            before = rng.choice(frames.before)
            question = before + (_lower_first(question) if before else question)
            question += rng.choice(frames.after)
        if rng.random() < 0.12:
            question = _drop_word(question, rng)
        if rng.random() < 0.15:
            question = _typo(question, rng)
        if rng.random() < 0.3:
            question = _contract(question)
        return _case_and_marks(question, rng)


def _syllable(rng: random.Random) -> str:
    return rng.choice(_ONSETS) + rng.choice(_VOWELS)


def _whole(word: str) -> str:
    return rf"(?<![\w/-]){re.escape(word)}(?![\w/-])"


def _contains(question: str, word: str) -> bool:
    return re.search(_whole(word), question) is not None


def _insert_before_mark(question: str, words: str) -> str:
    body = question.rstrip("?.! ")
    return body + words + question[len(body) :]


def _lower_first(question: str) -> str:
    return question[:1].lower() + question[1:] if question[1:2].islower() else question


def _drop_word(question: str, rng: random.Random) -> str:
    """Leave out one short word: what people do when they type in a hurry."""
    words = question.split()
    short = [i for i, word in enumerate(words) if len(word) <= 3 and word.isalpha()]
    if len(words) < 4 or not short:
        return question
    del words[rng.choice(short)]
    return " ".join(words)


def _typo(question: str, rng: random.Random) -> str:
    """One slip of the finger inside a longer word; names of flags and paths stay as they are."""
    words = question.split()
    long = [i for i, word in enumerate(words) if len(word) >= 5 and word.isalpha()]
    if not long:
        return question
    at = rng.choice(long)
    words[at] = _slip(words[at], rng)
    return " ".join(words)


def _slip(word: str, rng: random.Random) -> str:
    i = rng.randrange(1, len(word) - 1)
    swapped = word[:i] + word[i + 1] + word[i] + word[i + 2 :]
    doubled = word[:i] + word[i] + word[i:]
    wrong = word[:i] + rng.choice(_LETTERS) + word[i + 1 :]
    return rng.choice((swapped, doubled, wrong, word[:i] + word[i + 1 :]))


def _contract(question: str) -> str:
    for long, short in (
        ("What is", "What's"),
        ("what is", "what's"),
        ("do not", "don't"),
        ("does not", "doesn't"),
        ("I am", "I'm"),
        ("cannot", "can't"),
        ("Who is", "Who's"),
        ("Where is", "Where's"),
    ):
        question = question.replace(long, short)
    return question


def _case_and_marks(question: str, rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.2:
        question = question.lower()
    elif draw < 0.23:
        question = question.upper()
    draw = rng.random()
    if draw < 0.2:
        question = question.rstrip("?.!") or question
    elif draw < 0.25:
        question += rng.choice(("?", "!", "??", " ?", "..."))
    return question
