"""Steps planned by hand: a scheduler's moves, one call each, for tests of an executor.

It keeps block ownership right (shuffled ids, copy-on-write forks, freed blocks are poisoned) and
leaves every decision to the test.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from pdserve.engine_core.executor import ScheduledChunk, StepPlan, StepResult
from pdserve.engine_core.scheduler.sequence import Sequence
from pdserve.messages.engine import EngineSpec
from pdserve.messages.request import GenerateRequest, SamplingParams, TokenLogprob
from pdserve.token_ids import token_ids
from pdserve_engines.torch.executor import TorchExecutor

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq
    from pathlib import Path

GREEDY = SamplingParams(max_tokens=1000, temperature=0.0)


def spec(directory: Path, **fields: object) -> EngineSpec:
    """A small spec for the checkpoint in `directory`."""
    defaults: dict[str, object] = {"block_size": 8, "threads": 1, "device": "cpu"}
    return EngineSpec(engine="torch", model=str(directory), **defaults | fields)  # type: ignore[arg-type]


def loaded(directory: Path, num_blocks: int = 64, **fields: object) -> TorchExecutor:
    """An executor, loaded and allocated."""
    executor = TorchExecutor()
    executor.load(spec(directory, **fields), lambda stage, fraction: None)
    executor.allocate(num_blocks)
    return executor


def sequence(
    prompt: Seq[int],
    sampling: SamplingParams = GREEDY,
    handle: int = 0,
    prompt_index: int = 0,
) -> Sequence:
    """A sequence without blocks, nothing computed."""
    request = GenerateRequest(
        request_id=f"r{handle}",
        model="m",
        prompt=token_ids(prompt),
        sampling=sampling,
        prompt_index=prompt_index,
    )
    return Sequence(
        handle=handle,
        choice=0,
        request=request,
        tokens=token_ids(prompt),
        prompt_len=len(prompt),
        arrival=0.0,
    )


class Driver:
    """Owns the blocks of one executor."""

    def __init__(self, executor: TorchExecutor, seed: int = 0) -> None:
        assert executor.pool is not None
        self.executor = executor
        self.pool = executor.pool
        self.block_size = self.pool.layout.block_size
        self.free = list(range(self.pool.num_blocks))
        random.Random(seed).shuffle(self.free)
        self.pool.tensor.fill_(torch.nan)
        self.results: list[StepResult] = []
        self._handles = 0
        self._copies: list[tuple[int, int]] = []
        self._references: dict[int, int] = {}

    # ------------------------------------------------------------ sequences

    def add(
        self, prompt: Seq[int], sampling: SamplingParams = GREEDY, prompt_index: int = 0
    ) -> Sequence:
        """A fresh sequence without blocks."""
        self._handles += 1
        return sequence(prompt, sampling, self._handles, prompt_index)

    def fork(self, parent: Sequence, choice: int) -> Sequence:
        """Another choice of `parent`'s request: full blocks shared, the partial one copied."""
        child = Sequence(
            handle=parent.handle,
            choice=choice,
            request=parent.request,
            tokens=parent.tokens[: parent.prompt_len],
            prompt_len=parent.prompt_len,
            arrival=0.0,
        )
        self.share(parent, child, min(parent.num_computed, parent.prompt_len - 1))
        return child

    def share(self, source: Sequence, target: Sequence, count: int) -> None:
        """`target` starts with `source`'s first `count` computed tokens."""
        assert count <= source.num_computed
        assert target.tokens[:count] == source.tokens[:count]
        full, rest = divmod(count, self.block_size)
        target.blocks = source.blocks[:full]
        for block in target.blocks:
            self._references[block] += 1
        if rest:
            target.blocks.append(self._take())
            self._copies.append((source.blocks[full], target.blocks[full]))
        target.num_computed = count

    def preempt(self, sequence: Sequence) -> None:
        """Take everything away; the tokens stay."""
        self.executor.release([sequence])
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        for block in sequence.blocks:
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
                self.pool.tensor[block] = torch.nan
                self.free.insert(0, block)
        sequence.blocks = []
        sequence.num_computed = 0

    # ------------------------------------------------------------ steps

    def step(self, *work: tuple[Sequence, int]) -> StepResult:
        """Compute `count` more tokens of each sequence; the last ones also sample."""
        chunks = []
        for sequence, count in work:
            end = sequence.num_computed + count
            assert 0 < count <= sequence.num_tokens - sequence.num_computed
            while len(sequence.blocks) * self.block_size < end:
                sequence.blocks.append(self._take())
            samples = end == sequence.num_tokens
            chunks.append(ScheduledChunk(sequence, sequence.num_computed, count, samples))
        copies, self._copies = self._copies, []
        result = self.executor.execute(StepPlan(chunks, copies))
        tokens = iter(result.tokens)
        for chunk in chunks:
            chunk.sequence.num_computed += chunk.count
            if chunk.samples:
                chunk.sequence.tokens.append(next(tokens))
        self.results.append(result)
        return result

    def advance(self, sequences: Seq[Sequence], chunk: int) -> None:
        """One step in which every sequence computes up to `chunk` tokens."""
        todo = [(seq, min(chunk, seq.num_tokens - seq.num_computed)) for seq in sequences]
        self.step(*todo)

    def finish(self, sequences: Seq[Sequence], outputs: int, chunk: int = 10**6) -> None:
        """Step until every sequence has `outputs` output tokens."""
        while todo := [seq for seq in sequences if seq.num_output < outputs]:
            self.advance(todo, chunk)

    def logprobs(self, sequence: Sequence, chunk: int = 10**6) -> TokenLogprob:
        """Compute `sequence` (alone) until it samples, and return what it sampled."""
        before = sequence.num_output
        while sequence.num_output == before:
            self.advance([sequence], chunk)
        found = self.results[-1].logprobs[0]
        assert found is not None
        return found

    def _take(self) -> int:
        block = self.free.pop()
        self._references[block] = 1
        return block
