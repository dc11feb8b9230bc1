"""The table of penalised sequences against counting anew, while batches change and lines grow."""

from __future__ import annotations

import random
from typing import Any

import torch

from pdserve.engine_core.scheduler.sequence import Sequence
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.token_ids import token_ids
from pdserve_engines.torch.sampling.penalties import Penalties
from pdserve_engines.torch.sampling.row_params import RowParamsCache

VOCAB = 300


class Batch:
    """A table, and sequences that grow and change places."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.params, self.table = RowParamsCache(), Penalties()
        self.sequences: list[Sequence] = []
        self.born = 0

    def add(self, **sampling: Any) -> None:
        """Add a sequence with a prompt of any length."""
        self.born += 1
        prompt = [self.random.randrange(VOCAB) for _ in range(self.random.choice([1, 3, 200]))]
        request = GenerateRequest(
            request_id="r",
            model="m",
            prompt=token_ids(prompt),
            sampling=SamplingParams(max_tokens=999, **sampling),
        )
        tokens = token_ids(prompt)
        self.sequences.append(Sequence(self.born, 0, request, tokens, len(prompt), arrival=0.0))

    def leave(self, index: int) -> None:
        """Let a sequence end."""
        key = self.sequences.pop(index).key
        self.params.forget(key)
        self.table.forget(key)

    def check(self) -> None:
        """Compare a step with the plain definition."""
        logits = torch.tensor(
            [[self.random.uniform(-4, 4) for _ in range(VOCAB)] for _ in self.sequences]
        )
        expected = [penalised(row, each) for row, each in zip(logits, self.sequences, strict=True)]
        self.table.apply(logits, self.params.of(self.sequences))
        assert torch.equal(logits, torch.stack(expected))


def penalised(logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """The same for one row, token by token."""
    logits, sampling = logits.clone(), sequence.sampling
    for token in set(sequence.tokens):
        if sampling.repetition_penalty != 1.0:
            factor = torch.tensor(sampling.repetition_penalty)
            value = logits[token]
            logits[token] = value / factor if value > 0 else value * factor
        if count := sequence.output.count(token):
            frequency = torch.tensor(sampling.frequency_penalty) * count
            logits[token] -= frequency + torch.tensor(sampling.presence_penalty)
    return logits


KINDS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.5, "presence_penalty": -0.25},
    {"repetition_penalty": 0.7, "frequency_penalty": -0.5, "presence_penalty": 1.0},
    {},
)


def test_changing_batches_are_penalised_as_if_every_token_were_counted_anew(
    seed: int, long: bool
) -> None:
    for life in range(40 if long else 4):
        batch = Batch(seed + life)
        for _ in range(30):
            draw = batch.random
            if not batch.sequences or draw.random() < 0.4:
                batch.add(**draw.choice(KINDS))
            if len(batch.sequences) > 1 and draw.random() < 0.25:
                batch.leave(draw.randrange(len(batch.sequences)))
            if draw.random() < 0.2:
                draw.shuffle(batch.sequences)
            batch.check()
            for sequence in batch.sequences:
                for _ in range(draw.choice([0, 1, 1, 1, 70])):
                    sequence.tokens.append(draw.randrange(VOCAB))
        batch.check()


def test_lines_are_used_again_and_the_last_one_frees_the_table() -> None:
    batch = Batch(1)
    for _ in range(40):
        batch.add(repetition_penalty=1.3)
        batch.check()
        if len(batch.sequences) == 3:
            batch.leave(0)
    assert batch.table._ids.shape[0] == 4
    while batch.sequences:
        batch.leave(0)
    assert len(batch.table) == 0
    assert batch.table._ids.numel() == batch.table._counts.numel() == 0


def test_a_sequence_without_penalties_takes_no_line() -> None:
    batch = Batch(2)
    batch.add()
    batch.check()
    assert len(batch.table) == 0
