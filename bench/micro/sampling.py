"""Measures what a decode step costs the host: CPU microseconds per step, and torch operations.

    python bench/micro/sampling.py

The model computes nothing, and a vocabulary of 64 makes the sampler's arithmetic small. So the time
is that of Python and of launching operations, which a step on a GPU costs, too. Each row of a batch
has a prompt of 512 tokens and grows by one token a step. In the row "changing", one sequence of the
batch leaves at every step and another takes its place. Rows are measured in turn within the same
rounds; the result is the best round.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pdserve.engine_core.executor import ScheduledChunk, StepPlan
from pdserve.engine_core.scheduler.sequence import Sequence
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.token_ids import token_ids
from pdserve_engines.torch.executor import TorchExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 256
VOCAB = 64
PROMPT = 512
BLOCK = 32
STEPS = 24
ROUNDS = 5

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "min_p, top_k, top_p": {"temperature": 0.8, "min_p": 0.01, "top_k": 40, "top_p": 0.9},
    "penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
    },
    "bias, min_tokens": {
        "temperature": 1.0,
        "logit_bias": {5: 2.0, 9: -3.0},
        "min_tokens": 1000,
        "eos_token_ids": (2,),
    },
    "allowed, bad words": {
        "temperature": 1.0,
        "allowed_token_ids": tuple(range(32)),
        "bad_words": ((3,), (4, 5)),
    },
    "logprobs": {"temperature": 1.0, "logprobs": 2},
}


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that reach a device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Model:
    """A model that computes nothing."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.numbers = torch.randn(BATCH, VOCAB, generator=generator)

    def forward(self, batch: object, after: object) -> torch.Tensor:
        """Return the logits."""
        return self.numbers

    def greedy(self, batch: object, after: object) -> list[int]:
        """Return one token for each row."""
        return [1] * BATCH

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a copy, which the sampler may change."""
        return hidden.clone()


class Batch:
    """A batch that decodes."""

    def __init__(self, kinds: list[dict[str, Any]], *, changing: bool) -> None:
        self.kinds, self.changing = kinds, changing
        self.random = random.Random(0)
        self.executor, self.model = TorchExecutor(), Model()
        self.executor._model = self.model  # type: ignore[assignment]
        self.born = 0
        self.sequences = [self.sequence() for _ in range(BATCH)]

    def sequence(self) -> Sequence:
        """The next sequence of the batch."""
        number, self.born = self.born, self.born + 1
        kind = self.kinds[number % len(self.kinds)]
        prompt = token_ids(self.random.randrange(VOCAB) for _ in range(PROMPT))
        request = GenerateRequest(
            request_id=f"r{number}",
            model="m",
            prompt=prompt,
            sampling=SamplingParams(max_tokens=10_000, seed=number, **kind),
        )
        sequence = Sequence(number, 0, request, prompt[:], PROMPT, arrival=0.0)
        sequence.tokens.append(0)
        sequence.blocks = list(range(2 * PROMPT // BLOCK))
        return sequence

    def step(self) -> None:
        """Decode one token for every row."""
        if self.changing:
            place = self.born % BATCH
            self.executor.release([self.sequences[place]])
            self.sequences[place] = self.sequence()
        chunks = [
            ScheduledChunk(sequence, len(sequence.tokens) - 1, 1, True)
            for sequence in self.sequences
        ]
        result = self.executor._compute(StepPlan(chunks), self.model, BLOCK)  # type: ignore[arg-type]
        for sequence, token in zip(self.sequences, result.tokens, strict=True):
            sequence.tokens.append(token)


def best(step: Callable[[], None]) -> float:
    """Microseconds of a step, in one round."""
    began = time.process_time()
    for _ in range(STEPS):
        step()
    return (time.process_time() - began) / STEPS * 1e6


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    arms: dict[str, Batch] = {}
    for name, kind in KINDS.items():
        arms[name] = Batch([kind], changing=False)
    arms["mixed, a kind each"] = Batch(list(KINDS.values()), changing=False)
    arms["mixed, one row leaves each step"] = Batch(list(KINDS.values()), changing=True)
    found = dict.fromkeys(arms, float("inf"))
    with torch.inference_mode():
        for _ in range(ROUNDS):
            for name, batch in arms.items():
                found[name] = min(found[name], best(batch.step))
        for name, batch in arms.items():
            with Operations() as operations:
                batch.step()
            print(f"{name:28} {found[name]:9.0f} us {operations.count:6} operations")


if __name__ == "__main__":
    main()
