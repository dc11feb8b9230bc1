"""The question/answer corpus: what is in it, and when two questions count as the same.

Knows nothing about tokens or training. The corpus is the folder beside this file, one TOML file per
theme, and `frames.toml` with the patterns that `augment` fills in.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
FRAMES = "frames.toml"
PREVIOUS = "{previous}"
"""An answer that stands for "what I said last"."""
OFF_TOPIC = "off-topic"
"""The id of the pair that answers everything that is not about pdserve."""

_WORD = re.compile(r"[\w/+*-]+")


@dataclass(frozen=True)
class Pair:
    """One answer and the questions that ask for it."""

    id: str
    answer: str
    phrasings: tuple[str, ...]
    """Trained, in many variations."""
    held_out: tuple[str, ...]
    """Never trained, in no variation; they measure whether the model has understood."""
    topics: tuple[str, ...] = ()
    """What the pair explains, to be put into the `define` frames."""
    weight: float = 1.0
    """How often the pair is drawn, relative to the others."""
    first_turn_answer: str | None = None
    """What to say instead when nothing was said before; only where the answer is `{previous}`."""

    def reply(self, previous: str | None) -> str:
        """The answer in a conversation whose last answer was `previous`."""
        if self.answer != PREVIOUS:
            return self.answer
        return self.first_turn_answer or "" if previous is None else previous


@dataclass(frozen=True)
class Frames:
    """Patterns and word lists that multiply the phrasings. See `corpus/frames.toml`."""

    define: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    context: tuple[str, ...]
    swaps: tuple[tuple[str, ...], ...]
    things: tuple[str, ...]
    thing_questions: tuple[str, ...]
    system: tuple[str, ...]


@dataclass(frozen=True)
class Corpus:
    """All pairs, the frames, and the questions that must not be trained."""

    pairs: tuple[Pair, ...]
    frames: Frames
    forbidden: frozenset[str] = field(default_factory=frozenset)
    """The held-out questions, normalised."""
    owner: dict[str, str] = field(default_factory=dict)
    """Normalised trained phrasing → id of its pair: a variation must not run into another pair."""

    def by_id(self, pair_id: str) -> Pair:
        """The pair with this id; `KeyError` when there is none."""
        for pair in self.pairs:
            if pair.id == pair_id:
                return pair
        raise KeyError(pair_id)


def normalise(question: str) -> str:
    """A question without case and punctuation: what makes two questions the same."""
    return " ".join(_WORD.findall(question.lower())) or question.strip()


def load(folder: Path = CORPUS) -> Corpus:
    """Read every TOML file of the corpus, in the order of their names."""
    pairs: list[Pair] = []
    for path in sorted(folder.glob("*.toml")):
        if path.name != FRAMES:
            pairs += [_pair(entry) for entry in tomllib.loads(path.read_text("utf-8"))["pair"]]
    forbidden = frozenset(normalise(q) for pair in pairs for q in pair.held_out)
    owner = {normalise(q): pair.id for pair in pairs for q in pair.phrasings}
    return Corpus(tuple(pairs), _frames(folder / FRAMES), forbidden, owner)


def _pair(entry: dict[str, Any]) -> Pair:
    lists = {"phrasings", "held_out", "topics"}
    fields: dict[str, Any] = {k: tuple(v) if k in lists else v for k, v in entry.items()}
    return Pair(**fields)


def _frames(path: Path) -> Frames:
    data = tomllib.loads(path.read_text("utf-8"))
    return Frames(
        define=tuple(data["define"]["train"]),
        before=tuple(data["wrap"]["before"]),
        after=tuple(data["wrap"]["after"]),
        context=tuple(data["wrap"]["context"]),
        swaps=tuple(tuple(group) for group in data["swap"]["groups"]),
        things=tuple(data["off_topic"]["things"]),
        thing_questions=tuple(data["off_topic"]["questions"]),
        system=tuple(data["system"]["messages"]),
    )
