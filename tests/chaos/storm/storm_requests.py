"""What is asked in a storm, and what the answer must be.

A pool of distinct requests, drawn from a seed: chats and completions, one choice to three, greedy
and sampled with a seed, beginnings in common, some prompts long, some with stop strings or
logprobs. Each fixes its answer, token by token, so it may be asked any number of times, streamed
or whole. What the answer is, an undisturbed run says (`expected_of`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.chaos.storm.client_request import ClientRequest

WORDS = (
    *("the", "red", "quick", "lazy", "old", "fox", "dog", "sea", "tree", "moon", "runs", "jumps"),
    *("sees", "likes", "over", "under", "near"),
)
IDS = range(300, 1200)
"""Ordinary tokens of the bundled model."""
STOP_LENGTH = 5
"""Characters: longer than most tokens, so that text has to be held back."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the pool of requests, in tokens."""

    count: int = 200
    """Without those with stop strings."""
    stops: int = 60
    """With one, made from the answers to others."""
    longest_prompt: int = 500
    outputs: tuple[int, int] = (10, 120)


@dataclass(frozen=True)
class StormRequest:
    """One request, but for how it is to be answered."""

    number: int
    path: str
    fields: dict[str, Any]
    choices: int = 1

    @property
    def chat(self) -> bool:
        return self.path.startswith("/v1/chat")


@dataclass(frozen=True)
class Expected:
    """The only right answer."""

    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[str | None, str | int | None], ...]
    """Finish and stop reason of each choice."""
    logprobs: tuple[int, ...]
    """How many entries each choice has."""
    prompt: tuple[int, ...]
    usage: tuple[int, int]
    """Prompt and completion tokens."""


def draw(seed: int | str, sizes: Sizes) -> list[StormRequest]:
    """Draws the requests without stop strings."""
    rng = random.Random(f"questions {seed}")
    stems = [rng.choices(IDS, k=rng.randint(64, sizes.longest_prompt // 2)) for _ in range(6)]
    talks = [" ".join(rng.choices(WORDS, k=rng.randint(20, 60))) for _ in range(4)]
    return [_question(rng, number, stems, talks, sizes) for number in range(sizes.count)]


def _question(
    rng: random.Random,
    number: int,
    stems: Sequence[Sequence[int]],
    talks: Sequence[str],
    sizes: Sizes,
) -> StormRequest:
    choices = rng.choices((1, 2, 3), (70, 15, 15))[0]
    fields: dict[str, Any] = {
        "max_tokens": rng.randint(*sizes.outputs),
        "ignore_eos": True,
        "return_token_ids": True,
        "n": choices,
        "seed": rng.getrandbits(31),
        "temperature": rng.choice((0, 0.8, 1.0)),
    }
    if rng.random() < 0.2:
        fields |= {"frequency_penalty": 0.5, "repetition_penalty": 1.1}
    if rng.random() < 0.5:
        asked = rng.choice(talks) + f" {number} " + " ".join(rng.choices(WORDS, k=8))
        fields["messages"] = [{"role": "user", "content": asked}]
        if rng.random() < 0.25:
            fields |= {"logprobs": True, "top_logprobs": 2}
        return StormRequest(number, "/v1/chat/completions", fields, choices)
    stem = rng.choice(stems) if rng.random() < 0.7 else []
    rest = rng.randint(4, sizes.longest_prompt - len(stem) if rng.random() < 0.15 else 40)
    fields["prompt"] = [*stem, *rng.choices(IDS, k=rest)]
    if rng.random() < 0.25:
        fields["logprobs"] = 2
    return StormRequest(number, "/v1/completions", fields, choices)


def with_stops(
    seed: int | str, answers: Sequence[tuple[StormRequest, Expected]], sizes: Sizes
) -> list[StormRequest]:
    """Returns the requests again, each with a stop string that is in its answer."""
    rng = random.Random(f"stops {seed}")
    found: list[StormRequest] = []
    for question, expected in rng.sample(answers, min(len(answers), 3 * sizes.stops)):
        text = rng.choice(expected.texts)
        at = rng.randrange(max(1, len(text) - STOP_LENGTH))
        stop = text[at : at + STOP_LENGTH]
        if len(stop) < STOP_LENGTH or "\ufffd" in stop or len(found) == sizes.stops:
            continue
        number = sizes.count + len(found)
        fields = question.fields | {"stop": [stop, "never said in any answer"]}
        found.append(StormRequest(number, question.path, fields, question.choices))
    return found


def expected_of(life: ClientRequest) -> Expected:
    """What an undisturbed and completed life says of all others with its question."""
    assert life.done, f"nothing disturbs, and yet: {life.story()}"
    choices = life.choices
    return Expected(
        texts=tuple(choice.text for choice in choices),
        tokens=tuple(tuple(choice.tokens) for choice in choices),
        ends=tuple((choice.finish, choice.stop) for choice in choices),
        logprobs=tuple(choice.logprobs for choice in choices),
        prompt=tuple(life.prompt),
        usage=(life.usage["prompt_tokens"], life.usage["completion_tokens"]),
    )


@dataclass
class Pool:
    """All questions with their answers."""

    answers: list[tuple[StormRequest, Expected]] = field(default_factory=list)

    def pick(self, rng: random.Random) -> tuple[StormRequest, Expected]:
        """Any."""
        return rng.choice(self.answers)
