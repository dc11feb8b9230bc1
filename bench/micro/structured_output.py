"""Measures the cost of grammars: compiling, a mask per token, and applying it, beside a step.

    python bench/micro/structured_output.py [--model DIRECTORY] [--vocab N]

`--model` names the model of the tokenizer and the step; the default is the bundled one. `--vocab`
sets the width of the logits, for vocabularies of models that this machine does not have.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pdserve
from pdserve.engine_core.scheduler.sequence import Sequence
from pdserve.engine_core.structured_output import (
    StructuredOutputManager,
    pick_allowed_token,
    read_tokenizer,
)
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.text.grammar.grammar_source import from_choice, from_regex, from_schema
from pdserve.token_ids import token_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

BUNDLED = Path(pdserve.__file__).parent / "bundled"
END = 3
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"pattern": "^[0-9]{5}$"}},
            "required": ["street"],
        },
    },
    "required": ["name", "age", "tags"],
}
CASES = {
    "any object": from_schema({"type": "object"}, "x"),
    "a schema of 7 properties": from_schema(PERSON, "x"),
    "a schema of 300 properties": from_schema(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}}, "x"
    ),
    "an enum of 2000": from_schema({"enum": [f"value number {i}" for i in range(2000)]}, "x"),
    "a pattern": from_regex(r"[A-Z][a-z]{2,20} [0-9]{4}-[0-9]{2}(, [a-z ]{1,80})*", "x"),
    "16 choices": from_choice([f"choice {i}" for i in range(16)], "x"),
}


def sequence(grammar: str) -> Sequence:
    """Makes a sequence without output."""
    sampling = SamplingParams(max_tokens=999, grammar=grammar, eos_token_ids=(END,))
    request = GenerateRequest(request_id="r", model="m", prompt=token_ids([5]), sampling=sampling)
    return Sequence(1, 0, request, token_ids([5]), 1, arrival=0.0)


def masks(manager: StructuredOutputManager, grammar: str, vocab: int) -> Iterator[float]:
    """Seconds of each mask on the way to the end, the matcher's own steps included."""
    rng, one = random.Random(1), sequence(grammar)
    while one.num_output < 200 and one.tokens[-1] != END:
        begin = time.perf_counter()
        mask = manager.allowed(one)
        yield time.perf_counter() - begin
        assert mask is not None
        one.tokens.append(pick_allowed_token(mask, range(4, vocab), rng.getrandbits(60), (END,)))
    manager.release(one.key)


def step_seconds(model: Path) -> float:
    """Seconds of a decode step of one sequence on the torch engine, with the least sampling."""
    from pdserve.messages.engine import EngineSpec
    from pdserve.testing.inline_engine import InlineEngine
    from pdserve_engines.torch.executor import TorchExecutor

    spec = EngineSpec(engine="torch", model=str(model), device="cpu", threads=1, block_size=32)
    request = GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids([5, 6, 7]),
        sampling=SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True),
    )
    with InlineEngine.of(TorchExecutor(), spec) as engine:
        engine.generate([request])
        begin = time.perf_counter()
        engine.generate([request])
        return (time.perf_counter() - begin) / 200


def apply_seconds(rows: int, vocab: int) -> float:
    """Seconds of applying masks to `rows` rows of logits."""
    import torch

    from pdserve_engines.torch.sampling.grammar_masks import _apply

    logits = torch.randn(rows, vocab)
    given = {row: bytes([0xAA]) * (-(-vocab // 8)) for row in range(rows)}
    taken = []
    for _ in range(30):
        begin = time.perf_counter()
        _apply(logits, given)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def main(argv: list[str] | None = None) -> int:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--vocab", type=int, default=1280, help="the model's rows")
    arguments = parser.parse_args(argv)
    step = step_seconds(arguments.model)
    lines: list[str] = [f"step {step * 1e3:.3f} ms"]
    for name, source in CASES.items():
        lines.append(_line(name, source, arguments, step))
    for rows, vocab in ((1, 1280), (16, 1280), (1, 151_936), (16, 151_936)):
        lines.append(f"{rows} masks on {vocab} logits: {apply_seconds(rows, vocab) * 1e3:.3f} ms")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _line(name: str, source: Any, arguments: argparse.Namespace, step: float) -> str:
    manager = StructuredOutputManager(
        read_tokenizer(arguments.model), arguments.vocab, (END,), inline=True
    )
    manager.allowed(sequence(from_choice(["a"], "x").text))  # the vocabulary is read
    manager.release((1, 0))
    begin = time.perf_counter()
    manager.expect(sequence(source.text).sampling)
    compiled = time.perf_counter() - begin
    taken = [seconds for _ in range(5) for seconds in masks(manager, source.text, arguments.vocab)]
    median, most = statistics.median(taken), sorted(taken)[int(len(taken) * 0.99)]
    return (
        f"{name}: compiled in {compiled * 1e3:.2f} ms ({compiled / step:.1f} steps); a mask "
        f"{median * 1e3:.3f} ms ({median / step:.0%} of a step), p99 {most * 1e3:.3f} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
