"""What the children share: the loop that answers. Runs in the peers' environments, so it needs
nothing but Python."""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Protocol


class Model(Protocol):
    """A loaded peer."""

    name: str
    vocab: int

    def generate(self, prompts: list[list[int]], outputs: int) -> list[list[int]]:
        """The greedy continuations, of exactly so many tokens."""
        ...


def serve(model: Model) -> None:
    """Answers questions from standard input until an empty one."""
    say({"name": model.name})
    for line in sys.stdin:
        question = json.loads(line)
        if not question:
            return
        if isinstance(question, dict):
            say({"tokens": model.generate([question["prompt"]], question["outputs"])[0]})
        else:
            say({"seconds": _seconds(model, *question)})


def _seconds(model: Model, batch: int, length: int, outputs: int) -> float:
    prompts = [[random.randrange(model.vocab) for _ in range(length)] for _ in range(batch)]
    begin = time.perf_counter()
    made = model.generate(prompts, outputs)
    passed = time.perf_counter() - begin
    assert [len(one) for one in made] == [outputs] * batch
    return passed


def say(words: dict[str, object]) -> None:
    """Writes one line."""
    print(json.dumps(words), flush=True)
