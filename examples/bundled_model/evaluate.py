"""How often the bundled model gives exactly the answer that was written for a question.

    python -m examples.bundled_model.evaluate --model pdserve/bundled --out bench/results

Greedy, in fp32, from the stored (rounded) weights. An answer counts only if every token of it is
right and it ends where it should. One forward pass decides that: greedy decoding yields the wanted
tokens if and only if each of them is the most likely one after those before it. A sample is decoded
token by token as well, to check exactly that.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from examples.bundled_model.damage import damage_rates
from examples.bundled_model.judge import Case, Judge, Rate, cases, later, rate, with_system
from examples.bundled_model.qa import OFF_TOPIC, Corpus, load

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Miss:
    """A question that got another answer than the one written for it."""

    pair: str
    question: str
    got: str


def measure(judge: Judge, corpus: Corpus, seed: int) -> tuple[list[Rate], list[Miss]]:
    """All rates, and what the model said instead in the plain held-out cases."""
    rng = random.Random(seed)
    trained = cases(corpus, lambda pair: pair.phrasings)
    held = cases(corpus, lambda pair: pair.held_out)
    about, other = _split(held)
    rates = [rate("trained phrasings", judge, trained), rate("held-out phrasings", judge, held)]
    rates.append(rate("held-out, about pdserve", judge, about))
    rates.append(rate("held-out, off-topic", judge, other))
    rates.append(rate("held-out, system message", judge, [with_system(case) for case in held]))
    bare = [_bare(case) for case in held]
    rates.append(rate("held-out, lower case, no punctuation", judge, bare))
    for tokens, count in ((300, 400), (1000, 200), (1900, 120)):
        for name, group in (("trained", trained), ("held-out", held)):
            chosen = rng.sample(group, min(count, len(group)))
            late = [later(case, corpus, judge, tokens, rng) for case in chosen]
            rates.append(rate(f"{name}, after turns up to {tokens} tokens", judge, late))
    return rates, _misses(judge, held)


def crosscheck(judge: Judge, corpus: Corpus, count: int, seed: int) -> Rate:
    """On a sample: does decoding token by token agree with the verdict of the forward pass?"""
    sample = random.Random(seed).sample(cases(corpus, lambda pair: pair.held_out), count)
    verdicts = judge.exact(sample)
    decoded = [judge.answer(case.messages) == case.answer for case in sample]
    agree = sum(a == b for a, b in zip(verdicts, decoded, strict=True))
    return Rate("token by token agrees with one pass", agree, count)


def report(rates: Sequence[Rate], misses: Sequence[Miss], facts: dict[str, object]) -> str:
    """The results as a short markdown page."""
    lines = ["# The bundled model: exact answers", ""]
    lines += [
        "Written by `python -m examples.bundled_model.evaluate`. An answer is exact when every",
        "token of it is the one that was written. Greedy, fp32, from the stored weights.",
        "",
    ]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "| questions | exact | of | rate |", "| --- | ---: | ---: | ---: |"]
    lines += [f"| {r.name} | {r.exact} | {r.cases} | {r.percent} % |" for r in rates]
    lines += ["", "What it said instead, for the held-out questions that it missed:", ""]
    lines += [f"- `{m.question}` ({m.pair}): {m.got}" for m in misses]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate a model directory and write `bundled_model.json` and `bundled_model.md`."""
    parser = argparse.ArgumentParser(prog="evaluate", description="Evaluate the bundled model.")
    parser.add_argument("--model", type=Path, default=Path("pdserve/bundled"))
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    corpus, judge = load(), Judge(args.model)
    rates, misses = measure(judge, corpus, args.seed)
    rates.append(crosscheck(judge, corpus, 60, args.seed))
    rates += damage_rates(judge, corpus, args.seed)
    facts = _facts(corpus, judge, args.model)
    args.out.mkdir(parents=True, exist_ok=True)
    page = report(rates, misses, facts)
    (args.out / "bundled_model.md").write_text(page, "utf-8")
    data = {
        "facts": facts,
        "rates": [asdict(r) | {"percent": r.percent} for r in rates],
        "misses": [asdict(miss) for miss in misses],
    }
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    (args.out / "bundled_model.json").write_text(text, "utf-8")
    print(page)


def _misses(judge: Judge, group: Sequence[Case]) -> list[Miss]:
    wrong = [c for c, good in zip(group, judge.exact(group), strict=True) if not good]
    return [Miss(c.pair, c.messages[-1]["content"], judge.answer(c.messages)) for c in wrong]


def _split(group: Sequence[Case]) -> tuple[list[Case], list[Case]]:
    return (
        [case for case in group if case.pair != OFF_TOPIC],
        [case for case in group if case.pair == OFF_TOPIC],
    )


def _bare(case: Case) -> Case:
    question = case.messages[-1]["content"].lower().rstrip("?.!")
    return Case(case.pair, [{"role": "user", "content": question}], case.answer)


def _facts(corpus: Corpus, judge: Judge, folder: Path) -> dict[str, object]:
    size = sum(path.stat().st_size for path in folder.iterdir() if path.suffix != ".pt")
    return {
        "parameters": sum(p.numel() for p in judge.model.parameters()),
        "bytes of the directory": size,
        "pairs": len(corpus.pairs),
        "trained phrasings": sum(len(pair.phrasings) for pair in corpus.pairs),
        "held-out phrasings": sum(len(pair.held_out) for pair in corpus.pairs),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
