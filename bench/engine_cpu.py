"""The torch engine on the CPU beside `transformers`, llama.cpp and vLLM: tokens per second.

    python bench/engine_cpu.py                          # about 91 M random parameters, both dtypes
    python bench/engine_cpu.py --sizes windows experts gemma3 gpt-oss --dtypes float32
    python bench/engine_cpu.py --llama PYTHON --vllm PYTHON --write bench/results/engine_cpu.md

All compute the same random checkpoint with the same number of threads, in turns; llama.cpp and vLLM
in processes of their own, by the Python of an environment that has them
(`pip install llama-cpp-python gguf safetensors`, `make vllm`).

Each round measures a quantity on every arm, one right after the other. Rates are medians over
rounds. (A decode rate is a difference of two times, so its best value would be the round in which
the shorter time was disturbed.) A ratio is the median over rounds of that round's ratio, so that
other work slows both sides. The same run measures the memory limit: a decode step cannot be faster
than reading every weight once. Nothing passes or fails.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.peers.engine_cpu.remote import Remote
from pdserve.engine_core.executor import ScheduledChunk, StepPlan
from pdserve.engine_core.scheduler.sequence import Sequence
from pdserve.messages.engine import EngineSpec
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.token_ids import token_ids
from pdserve_engines.torch.executor import TorchExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = 512
CONTEXT = 128
"""Prompt tokens of a decoding sequence."""
STEPS = 32
BATCHES = (1, 8, 16)
BLOCK = 32


@dataclass(frozen=True)
class Size:
    """A random model with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int = 8192
    family: str = "Llama"
    fields: dict[str, Any] = field(default_factory=dict)
    """Keys of the family's configuration."""


_WINDOW = 64
SIZES = {
    "10m": Size(256, 8, 4, 4, 1024),
    "91m": Size(768, 12, 12, 12, 2048),
    "91m-gqa": Size(768, 13, 12, 4, 2048),
    "windows": Size(768, 13, 12, 4, 2048, family="Mistral", fields={"sliding_window": _WINDOW}),
    "experts": Size(
        512,
        8,
        8,
        4,
        1024,
        family="Qwen3Moe",
        fields={
            "head_dim": 64,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 256,
            "norm_topk_prob": True,
        },
    ),
    "gemma3": Size(
        640,
        12,
        4,
        1,
        2048,
        family="Gemma3Text",
        fields={"head_dim": 256, "sliding_window": _WINDOW, "query_pre_attn_scalar": 256},
    ),
    "gpt-oss": Size(
        512,
        8,
        16,
        2,
        256,
        family="GptOss",
        fields={
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": _WINDOW,
        },
    ),
}


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    lines = [_machine(args.threads)]
    print(lines[0])
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            parameters = _write_checkpoint(SIZES[size], Path(folder))
            for dtype in args.dtypes:
                title = f"## {size}: {parameters / 1e6:.1f} M parameters, {dtype}"
                section = ["", title, "", *_compare(Path(folder), dtype, args)]
                print("\n".join(section), flush=True)
                lines += section
    if args.write:
        args.write.write_text(_header() + "\n".join(lines) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["91m"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--arms", nargs="+", default=["native", "torch"], help="kernels to compare")
    parser.add_argument("--llama", type=Path, help="a Python that has llama-cpp-python")
    parser.add_argument("--vllm", type=Path, help="a Python that has vLLM")
    parser.add_argument("--write", type=Path, help="write the report there as markdown")
    return parser.parse_args()


# ---------------------------------------------------------------- the two sides


class Peer:
    """`transformers` generate, greedy, with its own KV cache."""

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype)
        )
        self.model = model.eval()
        self.threads = threads

    def seconds(self, batch: int, prompt: int, outputs: int) -> float:
        """Time to generate `outputs` tokens for each of `batch` prompts."""
        torch.set_num_threads(self.threads)
        ids = torch.randint(0, self.model.config.vocab_size, (batch, prompt))
        begin = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=outputs,
                max_new_tokens=outputs,
                pad_token_id=0,
            )
        return time.perf_counter() - begin

    def tokens(self, prompt: list[int], outputs: int) -> list[int]:
        """The greedy continuation of a prompt."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            made = self.model.generate(ids, do_sample=False, max_new_tokens=outputs, pad_token_id=0)
        found: list[int] = made[0, len(prompt) :].tolist()
        return found


class Ours:
    """The executor, stepped as the scheduler would: one prefill step, then decode steps."""

    def __init__(self, folder: Path, dtype: str, threads: int, kernels: str) -> None:
        self.executor = TorchExecutor()
        spec = EngineSpec(
            engine="torch",
            model=str(folder),
            device="cpu",
            dtype=dtype,
            threads=threads,
            block_size=BLOCK,
            options={"kernels": kernels},
        )
        self.info = self.executor.load(spec, lambda stage, fraction: None)
        self.executor.allocate(max(BATCHES) * (CONTEXT + STEPS + BLOCK) // BLOCK + PROMPT)

    def seconds(self, batch: int, prompt: int, outputs: int) -> float:
        """Time to generate `outputs` tokens for each of `batch` prompts."""
        self.executor.prepare_thread()
        prompts = torch.randint(0, self.info.vocab_size, (batch, prompt)).tolist()
        width = -(-(prompt + outputs) // BLOCK)
        sequences = [_sequence(row, tokens, width) for row, tokens in enumerate(prompts)]
        begin = time.perf_counter()
        for _ in range(outputs):
            self._step(sequences)
        return time.perf_counter() - begin

    def _step(self, sequences: list[Sequence]) -> None:
        chunks = [
            ScheduledChunk(seq, seq.num_computed, seq.num_tokens - seq.num_computed, True)
            for seq in sequences
        ]
        result = self.executor.execute(StepPlan(chunks))
        for sequence, token in zip(sequences, result.tokens, strict=True):
            sequence.num_computed = sequence.num_tokens
            sequence.tokens.append(token)


def _sequence(row: int, tokens: list[int], width: int) -> Sequence:
    sampling = SamplingParams(max_tokens=10**6, temperature=0.0)
    request = GenerateRequest(
        request_id=str(row), model="", prompt=token_ids(tokens), sampling=sampling
    )
    blocks = list(range(row * width, (row + 1) * width))
    return Sequence(row, 0, request, token_ids(tokens), len(tokens), 0.0, blocks=blocks)


Arm = Peer | Ours | Remote

# ---------------------------------------------------------------- the comparison


def _compare(folder: Path, dtype: str, args: argparse.Namespace) -> list[str]:
    peer = Peer(folder, dtype, args.threads)
    arms: dict[str, Arm] = {"transformers": peer}
    remotes = [
        Remote(python, module, folder, dtype, args.threads)
        for python, module in ((args.llama, "llama_cpp_child"), (args.vllm, "vllm_child"))
        if python is not None
    ]
    arms |= {remote.name: remote for remote in remotes}
    same = [_agreement(peer, remote) for remote in remotes]
    for kernels in args.arms:
        arms[f"pdserve {kernels}"] = Ours(folder, dtype, args.threads, kernels)
    weight_bytes = next(arm.info.weight_bytes for arm in arms.values() if isinstance(arm, Ours))
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in arms}
    bandwidths = []
    for round_ in range(args.rounds + 1):
        bandwidths.append(read_bandwidth(args.threads))
        for what, measure in _quantities().items():
            for name, arm in arms.items():
                rate = measure(arm)
                if round_:  # the first round warms up
                    rates[name].setdefault(what, []).append(rate)
    for arm in arms.values():
        if isinstance(arm, Ours):
            arm.executor.close()
        elif isinstance(arm, Remote):
            arm.close()
    del arms
    gc.collect()
    return [*_table(rates, weight_bytes, max(bandwidths)), *same]


def _agreement(peer: Peer, remote: Remote) -> str:
    """How many tokens of a greedy continuation are those of `transformers`, up to the first that is
    not: proof that both compute the same model."""
    prompt = torch.randint(0, peer.model.config.vocab_size, (CONTEXT,)).tolist()
    pairs = zip(peer.tokens(prompt, STEPS), remote.tokens(prompt, STEPS), strict=True)
    equal = next((at for at, (one, other) in enumerate(pairs) if one != other), STEPS)
    return f"{remote.name}: the first {equal} of {STEPS} greedy tokens are those of transformers."


def _quantities() -> dict[str, Callable[[Arm], float]]:
    """Rates by name, each in tokens per second."""
    found: dict[str, Callable[[Arm], float]] = {
        f"prefill {PROMPT}": lambda arm: PROMPT / arm.seconds(1, PROMPT, 1)
    }
    for batch in BATCHES:
        found[f"decode batch {batch}"] = functools.partial(_decode_rate, batch)
    return found


def _decode_rate(batch: int, arm: Arm) -> float:
    """Decode rate; the time of the first token, prompt included, is subtracted."""
    first = arm.seconds(batch, CONTEXT, 1)
    whole = arm.seconds(batch, CONTEXT, STEPS + 1)
    return batch * STEPS / (whole - first)


def read_bandwidth(threads: int, size: int = 1 << 29) -> float:
    """Bytes per second of reading memory once, as a sum over floats."""
    torch.set_num_threads(threads)
    data = torch.ones(size // 4)
    best = 0.0
    for _ in range(3):
        begin = time.perf_counter()
        data.sum()
        best = max(best, size / (time.perf_counter() - begin))
    return best


def _table(
    rates: dict[str, dict[str, list[float]]], weight_bytes: int, bandwidth: float
) -> list[str]:
    names = list(rates)
    ours = [name for name in names if name.startswith("pdserve")]
    others = [name for name in names if name not in ours]
    rounds = len(next(iter(rates["transformers"].values())))
    pairs = [(one, other) for one in ours for other in others]
    pairs += [(ours[0], ours[1])] if len(ours) == 2 else []
    heads = [*names, *(f"{_short(one)} / {_short(other)}" for one, other in pairs), "memory limit"]
    lines = [
        f"| tokens/s, median of {rounds} (least to most) | {' | '.join(heads)} |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for what in rates["transformers"]:
        cells = [_spread(rates[name][what], ",.0f") for name in names]
        for one, other in pairs:
            rounds_of = zip(rates[one][what], rates[other][what], strict=True)
            cells.append(_spread([own / its for own, its in rounds_of], ".2f"))
        limit = bandwidth / weight_bytes * int(what.split()[-1])
        cells.append(f"{limit:,.0f}" if what.startswith("decode") else "")
        lines.append(f"| {what} | {' | '.join(cells)} |")
    lines += [
        "",
        f"Weights {weight_bytes / 1e6:.0f} MB, read bandwidth {bandwidth / 1e9:.1f} GB/s: "
        f"at best {bandwidth / weight_bytes:.0f} decode steps per second that read all of them.",
    ]
    return lines


def _spread(values: list[float], form: str) -> str:
    """The median, and the range of all rounds."""
    least, most = format(min(values), form), format(max(values), form)
    return f"{statistics.median(values):{form}} ({least} to {most})"


def _short(name: str) -> str:
    return name.removeprefix("pdserve ")


# ---------------------------------------------------------------- set-up


def _write_checkpoint(size: Size, folder: Path) -> int:
    torch.manual_seed(0)
    config = getattr(transformers, f"{size.family}Config")(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        **size.fields,
    )
    model = getattr(transformers, f"{size.family.removesuffix('Text')}ForCausalLM")(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _machine(threads: int) -> str:
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return (
        f"{name}, {os.cpu_count()} CPUs, {threads} threads; Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}; "
        f"load average {os.getloadavg()[0]:.1f} at the start."
    )


def _header() -> str:
    return "# The torch engine on the CPU\n\nMade by `python bench/engine_cpu.py --write …`.\n\n"


if __name__ == "__main__":
    quiet: Any = transformers.utils.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    main()
