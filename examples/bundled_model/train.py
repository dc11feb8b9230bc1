"""Train the bundled model: tokenizer and weights, from the corpus and a seed.

    python -m examples.bundled_model.train --out /tmp/model --steps 2600

Runs on a CPU. Checkpoints go to `OUT/checkpoint.pt`; a second call with the same `--out` goes on
where the first one stopped. The same seed, versions and number of threads give the same model.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from examples.bundled_model import layout
from examples.bundled_model.augment import Augmenter
from examples.bundled_model.batches import SHAPES, RowMaker, Shape
from examples.bundled_model.qa import Corpus, load

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class Options:
    """What the command line sets."""

    out: Path
    steps: int
    seed: int
    threads: int
    lr: float
    vocab: int
    hidden: int
    layers: int
    save_every: int
    small: bool
    """Tiny batches: for a test that only wants to see the loss fall."""


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="train", description="Train the bundled model.")
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--vocab", type=int, default=1280)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--small", action="store_true", help="tiny batches, for tests")
    return Options(**vars(parser.parse_args(argv)))


def corpus_texts(corpus: Corpus) -> Iterator[str]:
    """The texts that the tokenizer learns from; held-out questions are not among them."""
    for pair in corpus.pairs:
        yield pair.answer
        yield from pair.phrasings
        for topic in pair.topics:
            yield f"What is {topic}? Explain {topic}."
    f = corpus.frames
    for group in (f.define, f.before, f.after, f.thing_questions, f.system):
        yield from group


def build_model(options: Options) -> LlamaForCausalLM:
    """A Llama with grouped queries (4 heads on 2) and tied embeddings."""
    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 5 // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=layout.CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=layout.SPECIAL.index(layout.BOS),
        eos_token_id=layout.SPECIAL.index(layout.END),
        pad_token_id=layout.SPECIAL.index(layout.PAD),
    )
    return LlamaForCausalLM(config)


class Trainer:
    """Owns the model, its optimiser and the step counter."""

    def __init__(self, options: Options, corpus: Corpus, tokenizer: Tokenizer) -> None:
        self.options = options
        self.model = build_model(options)
        self.optimizer = torch.optim.AdamW(
            _decay_groups(self.model), lr=options.lr, betas=(0.9, 0.95), fused=True
        )
        self.rows = RowMaker(corpus, Augmenter(corpus), tokenizer, _with_dropout(tokenizer))
        self.step = 0

    def run(self) -> list[float]:
        """Train to the last step; returns the loss of every step that this call made."""
        losses: list[float] = []
        began = time.monotonic()
        while self.step < self.options.steps:
            losses.append(self.one_step())
            if self.step % 50 == 0:
                recent = sum(losses[-50:]) / len(losses[-50:])
                print(f"{self.step} loss {recent:.4f} {time.monotonic() - began:.0f}s", flush=True)
            if self.step % self.options.save_every == 0:
                self.save()
        return losses

    def one_step(self) -> float:
        """One batch, one update."""
        # A fresh generator per step: a resumed run draws the same batches as an unbroken one.
        rng = random.Random(f"{self.options.seed}:{self.step}")
        ids, weights = self.batch(rng)
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * self.schedule()
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(input_ids=ids, use_cache=False).logits
        loss = weighted_loss(logits[:, :-1].float(), ids[:, 1:], weights[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return float(loss.detach())

    def batch(self, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of one drawn shape, as ids and weights."""
        shape = rng.choices(SHAPES, [shape.share for shape in SHAPES])[0]
        if self.options.small:
            shape = Shape(8, 64, 1.0)
        rows = [self.rows.row(shape.length, rng) for _ in range(shape.rows)]
        ids, weights = zip(*rows, strict=True)
        return torch.tensor(ids), torch.tensor(weights)

    def schedule(self) -> float:
        """Warm up, then a cosine down to one hundredth."""
        warm = min(1.0, (self.step + 1) / 100)
        return warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * self.step / self.options.steps)))

    def save(self) -> None:
        """Write the checkpoint in one piece: an interrupted save leaves the one before."""
        path = self.options.out / CHECKPOINT
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "step": self.step}, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)

    def resume(self) -> None:
        """Go on from the checkpoint in the output directory, if there is one."""
        path = self.options.out / CHECKPOINT
        if path.exists():
            state: dict[str, Any] = torch.load(path, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]


def weighted_loss(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Cross entropy, averaged with a weight per token."""
    each = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (each * weights.flatten()).sum() / weights.sum().clamp_min(1.0)


def export(trainer: Trainer, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model directory; the weights are rounded to bfloat16, which halves the file."""
    model = build_model(trainer.options)
    model.load_state_dict(trainer.model.state_dict())
    model.bfloat16().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["torch_dtype"] = config["dtype"]  # readers of either spelling find it
    layout.write_json(folder / "config.json", config)
    layout.write_tokenizer(tokenizer, folder)
    layout.write_generation_config(folder)


def train(options: Options) -> list[float]:
    """Make the tokenizer, train the model, write both. Returns the losses."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    corpus = load()
    tokenizer = layout.train_tokenizer(corpus_texts(corpus), options.vocab)
    trainer = Trainer(options, corpus, tokenizer)
    trainer.resume()
    losses = trainer.run()
    export(trainer, tokenizer, options.out)
    return losses


def _with_dropout(tokenizer: Tokenizer) -> Tokenizer:
    noisy = Tokenizer.from_str(tokenizer.to_str())
    noisy.model.dropout = 0.1
    return noisy


def _decay_groups(model: LlamaForCausalLM) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": norms, "weight_decay": 0.0},
    ]


if __name__ == "__main__":
    train(parse())
