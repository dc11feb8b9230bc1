"""The torch engine beside the device's limits: decode by bandwidth, prefill by matrix rate.

    bench/gpu/run.sh                                  # all of it, on a GPU, in under ten minutes
    python bench/gpu/engine.py --dry                  # tiny sizes, on whatever there is

The executor runs plans as the scheduler makes them, with random weights of real sizes in bfloat16.
A decode step reads every weight and the KV of every sequence once: these bytes per second are
compared with those of a copy. Each is measured in up to four ways: with CUDA graphs and without,
and begun before the step before has ended or after. Invariant kernels are measured at few sizes. A
prefill's products and attention per second are compared with the best product. Streams that
decode beside a long prompt are compared with a target time between two tokens. Each of the
engine's own kernels is also measured by itself, beside a copy. Both limits are measured in the same
call. Times are medians; no time is a pass or fail. What the time does not
suffice for is named, and so is who computes each model. What fails is named, too, and the rest is
measured; the exit status is 1 then. Results are written after every row, so a run that is ended
leaves what it has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[2] / "engines"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from bench.gpu import limits, shapes
from bench.machine import facts
from pdserve.engine_core.executor import ScheduledChunk, StepPlan
from pdserve.engine_core.scheduler.mixed_step_budget import MixedStepBudget
from pdserve.engine_core.scheduler.sequence import Sequence
from pdserve.errors import ConfigError
from pdserve.messages.engine import EngineSpec
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.token_ids import token_ids
from pdserve_engines.torch.executor import TorchExecutor
from pdserve_engines.torch.models.torch_model import TorchModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Sequence as Seq

    from bench.gpu.limits import Budget, Limits
    from bench.gpu.shapes import Shape
    from pdserve_engines.torch.step_in_flight import StepInFlight

BLOCK = 32
ITEM = 2
"""Bytes of a number in bfloat16."""
WARM = 3
"""Steps before those that are timed."""
TARGET = 0.025
"""Target seconds between two tokens of a stream while a prompt is computed."""
LEAST = 64
"""Fewest prompt tokens of a step beside streams."""
LOADING = 60.0
"""Seconds that have to be left for a model to be begun."""
SAMPLING = SamplingParams(max_tokens=10**6, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements of each model."""

    models: tuple[str, ...] = ("llama-3.2-1b", "llama-3.1-8b")
    batches: tuple[int, ...] = (1, 8, 64, 256)
    contexts: tuple[int, ...] = (512, 2048)
    """Numbers of tokens that each decoding sequence has."""
    mixed: tuple[int, int] | None = (256, 2048)
    """The shortest and the longest sequence of batches whose sequences differ in length."""
    prompts: tuple[int, ...] = (512, 2048, 8192, 32768)
    beside: tuple[int, int, int] | None = (32, 512, 32768)
    """Streams, with so many tokens each, that decode while a prompt of so many is computed."""
    steps: int = 30
    """Number of decode steps, each timed on its own."""


FEW = Plan(batches=(1, 64), contexts=(2048,), mixed=None, prompts=(2048,), beside=None)
"""What is measured of invariant kernels, which are there for reproducible tokens."""
DRY = Plan(("tiny",), (1, 3), (40,), (10, 40), (24, 64), (2, 24, 200), 4)


@dataclass(frozen=True, slots=True)
class Way:
    """How decode steps are computed."""

    graphs: bool = False
    ahead: bool = False
    """Each is begun before the one before has ended."""

    def __str__(self) -> str:
        return (", graphs" if self.graphs else "") + (", one step ahead" if self.ahead else "")


WAYS = (Way(), Way(ahead=True), Way(graphs=True), Way(graphs=True, ahead=True))


@dataclass(slots=True)
class Row:
    """One measurement."""

    model: str
    what: str
    seconds: float
    """The median time of one step."""
    rate: float
    """Tokens per second."""
    used: float
    """Share of the limit that was reached."""
    peak: int = 0
    """Most bytes of a GPU that a step held beside weights and KV."""


@dataclass(slots=True)
class Report:
    """All results."""

    machine: dict[str, str]
    limits: Limits
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    kernels: dict[str, str] = field(default_factory=dict)
    """Model -> who computes it, and why no faster kernels or no graphs do."""
    failures: list[str] = field(default_factory=list)
    """What ended by an error, which is a defect."""


def main(arguments: Seq[str] | None = None) -> int:
    """Measure, print, write. Returns the exit status."""
    options = _arguments(arguments)
    device = torch.device(options.device)
    plan = Plan(models=tuple(options.models))
    if options.dry:
        plan = DRY
        torch.set_num_threads(1)
    budget = limits.Budget(options.budget)
    begin = time.perf_counter()
    found = limits.measure(device, budget, dry=options.dry)
    report = Report(limits.machine(device), found, left_out=budget.left_out)

    def keep() -> None:
        report.machine["seconds"] = f"{time.perf_counter() - begin:.0f}"
        _write(report, options.out, options.name, dry=options.dry)

    keep()
    try:
        for model in plan.models:
            _measure_model(model, plan, device, budget, report, keep)
    finally:
        keep()
        print(markdown(report, dry=options.dry))
    return 1 if report.failures else 0


def _arguments(arguments: Seq[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=shapes.SHAPES, default=Plan().models)
    parser.add_argument("--budget", type=float, default=420.0, help="seconds to measure")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--name", default="gpu_engine", help="their name [%(default)s]")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, to see that it works")
    return parser.parse_args(arguments)


def _write(report: Report, folder: Path | None, name: str, *, dry: bool) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(markdown(report, dry=dry))
        (folder / f"{name}.json").write_text(json.dumps(asdict(report), indent=2) + "\n")


# ---------------------------------------------------------------- one model


def _measure_model(
    name: str,
    plan: Plan,
    device: torch.device,
    budget: Budget,
    report: Report,
    keep: Callable[[], None] = lambda: None,
) -> None:
    """`keep` is called after each row."""
    _measure_kernels(name, "", plan, device, budget, report, keep)
    if device.type == "cuda":
        _measure_alone(name, device, budget, report)
        keep()
        few = replace(FEW, steps=plan.steps)
        _measure_kernels(name, "invariant", few, device, budget, report, keep)


def _measure_alone(name: str, device: torch.device, budget: Budget, report: Report) -> None:
    """Measures each of the engine's own kernels by itself, with the sizes of a model."""
    from bench.gpu.kernels import kernel_runs, seconds_of  # a CPU may have no Triton

    model = f"{name}, kernels alone"
    with _noting(model, report):
        for run in kernel_runs(shapes.SHAPES[name], device):
            if not budget.allows(f"{model}, {run.what}"):
                continue
            with _noting(f"{model}, {run.what}", report):
                seconds = seconds_of(run, device)
                used = run.moved / seconds / report.limits.bandwidth
                _note(
                    Row(model, run.what, seconds, run.rows / seconds, used), run.what, model, report
                )


def _measure_kernels(
    name: str,
    kernels: str,
    plan: Plan,
    device: torch.device,
    budget: Budget,
    report: Report,
    keep: Callable[[], None],
) -> None:
    shape = shapes.SHAPES[name]
    name = f"{name}, invariant" if kernels == "invariant" else name
    if report.rows and not budget.allows(name, LOADING):
        return
    with tempfile.TemporaryDirectory() as folder, _noting(name, report):
        path = shapes.write(shape, Path(folder))
        engine = Engine(path, shape, device, _tokens(plan), kernels)
        report.kernels[name] = engine.kernels
        try:
            for what, measured in _quantities(name, plan, engine, report.limits):
                if budget.allows(f"{name}, {what}"):
                    with _noting(f"{name}, {what}", report):
                        _note(measured(), what, name, report)
                keep()
        finally:
            engine.close()


@contextmanager
def _noting(what: str, report: Report) -> Iterator[None]:
    """Notes an error of the block. What does not fit or is not possible is left out; any other
    error is a failure."""
    try:
        yield
    except (ConfigError, torch.OutOfMemoryError, MemoryError) as error:
        report.left_out.append(f"{what}: {_first_line(error)}")
    except Exception as error:
        traceback.print_exc()
        report.failures.append(f"{what}: {type(error).__name__}: {_first_line(error)}")


def _note(row: Row, what: str, name: str, report: Report) -> None:
    print(f"{name}, {what}: {row.seconds * 1e3:.2f} ms, {row.used:.1%}", flush=True)
    report.rows.append(row)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]


def _tokens(plan: Plan) -> int:
    """Returns the number of tokens that the KV pool needs room for."""
    lengths: list[int] = [*plan.contexts, *(plan.mixed or ())]
    longest = max(lengths)
    widest = max(plan.batches) * (longest + plan.steps + 2 * BLOCK)
    beside = 0
    if plan.beside:
        streams, tokens, prompt = plan.beside
        beside = prompt + streams * (tokens + WARM + prompt // LEAST + 2 * BLOCK)
    return max(widest, beside, max(plan.prompts) + BLOCK)


class Engine:
    """An executor with random weights and a KV pool."""

    def __init__(
        self, folder: Path, shape: Shape, device: torch.device, tokens: int, kernels: str = ""
    ) -> None:
        """`kernels`: the engine's option; empty: the default on a GPU, torch's elsewhere."""
        self.shape = shape
        self.device = device
        self.executor = TorchExecutor()
        spec = EngineSpec(
            engine="torch",
            model=str(folder),
            device=str(device),
            dtype="bfloat16",
            block_size=BLOCK,
            threads=torch.get_num_threads(),
            options={"kernels": kernels or ("auto" if device.type == "cuda" else "torch")},
        )
        self.executor.load(spec, lambda stage, fraction: None)
        model = self.executor._model
        assert isinstance(model, TorchModel)
        with torch.inference_mode():
            for group in (model._held.params, *model._held.layers):
                shapes.fill(group.values())
        self.executor.allocate(self._blocks(tokens))
        assert self.executor.pool is not None
        self.executor.pool.tensor.normal_()
        self._graphs = self.executor._graphs

    @property
    def kernels(self) -> str:
        """Who computes, and why no faster kernels or no graphs do."""
        model, info = self.executor._model, self.executor.info
        assert model is not None
        assert info is not None
        missing = (info.slow_kernels, self.executor.graphs_missing)
        return "; ".join((model.kernels, *filter(None, missing)))

    @property
    def ways(self) -> list[Way]:
        """How decode steps can be computed here."""
        return [way for way in WAYS if self._graphs is not None or not way.graphs]

    def take(self, way: Way) -> None:
        """Computes with graphs or without from now on."""
        self.executor._graphs = self._graphs if way.graphs else None

    def _blocks(self, tokens: int) -> int:
        """Returns the number of blocks that are wanted, or fewer if they do not fit. Rows that need
        more blocks are then left out."""
        wanted = -(-tokens // BLOCK)
        if self.device.type != "cuda":
            return wanted
        free, _ = torch.cuda.mem_get_info(self.device)
        return min(wanted, int(0.6 * free) // (BLOCK * self.shape.kv_bytes(ITEM)))

    def sequences(self, lengths: Seq[int], room: int) -> list[Sequence]:
        """Makes sequences of these numbers of tokens, with blocks for `room` more tokens each."""
        assert self.executor.pool is not None
        ends = list(itertools.accumulate(-(-(tokens + room) // BLOCK) for tokens in lengths))
        if ends[-1] > self.executor.pool.num_blocks:
            raise torch.OutOfMemoryError(f"{ends[-1]} blocks do not fit beside the weights")
        return [
            self._sequence(row, tokens, list(range(*blocks)))
            for row, (tokens, blocks) in enumerate(
                zip(lengths, itertools.pairwise([0, *ends]), strict=True)
            )
        ]

    def _sequence(self, row: int, tokens: int, blocks: list[int]) -> Sequence:
        prompt = torch.randint(3, self.shape.vocab, (tokens,)).tolist()
        request = GenerateRequest(
            request_id=str(row), model="", prompt=token_ids(prompt), sampling=SAMPLING
        )
        return Sequence(row, 0, request, token_ids(prompt), tokens, 0.0, blocks=blocks)

    def step(self, sequences: Seq[Sequence]) -> None:
        """Computes all tokens that the sequences lack, and appends the next token of each."""
        chunks = [
            ScheduledChunk(each, each.num_computed, len(each.tokens) - each.num_computed, True)
            for each in sequences
        ]
        result = self.executor.execute(StepPlan(chunks))
        for each, token in zip(sequences, result.tokens, strict=True):
            each.num_computed = len(each.tokens)
            each.tokens.append(token)

    def close(self) -> None:
        """Frees the device's memory."""
        self.executor._graphs = self._graphs
        self.executor.close()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class Ahead:
    """Decode steps of which each is begun before the one before has ended."""

    def __init__(self, engine: Engine, sequences: Seq[Sequence]) -> None:
        self._executor, self._sequences = engine.executor, sequences
        chunks = [ScheduledChunk(each, each.num_computed, 1, True) for each in sequences]
        self._step = self._begun(StepPlan(chunks))
        self._executor.sample(self._step, self._step.plan)

    def turn(self) -> None:
        """Begins a step, and takes in the one before."""
        chunks = [
            ScheduledChunk(each, each.num_computed + 1, 1, True, token_from=row)
            for row, each in enumerate(self._sequences)
        ]
        following = self._begun(StepPlan(chunks))
        self.end()
        self._executor.sample(following, following.plan)
        self._step = following

    def end(self) -> None:
        """Takes in the step under way."""
        result = self._executor.finish(self._step)
        for each, token in zip(self._sequences, result.tokens, strict=True):
            each.num_computed += 1
            each.tokens.append(token)

    def _begun(self, plan: StepPlan) -> StepInFlight:
        return self._executor.begin(plan)


# ---------------------------------------------------------------- what is measured


def _quantities(
    name: str, plan: Plan, engine: Engine, found: Limits
) -> Iterator[tuple[str, Callable[[], Row]]]:
    batches = {
        f"{batch} × {context}": [context] * batch
        for context, batch in itertools.product(plan.contexts, plan.batches)
    }
    if plan.mixed is not None:
        shortest, longest = plan.mixed
        for batch in (each for each in plan.batches if each > 1):
            lengths = torch.linspace(shortest, longest, batch).long().tolist()
            batches[f"{batch} × {shortest} to {longest}"] = lengths
    for (size, contexts), way in itertools.product(batches.items(), engine.ways):
        what = f"decode {size}{way}"
        yield what, partial(_decode, name, what, engine, found, contexts, plan.steps, way)
    for tokens in plan.prompts:
        what = f"prefill {tokens}"
        yield what, partial(_prefill, name, what, engine, found, tokens)
    if plan.beside:
        streams, context, tokens = plan.beside
        what = f"{streams} × {context} beside a prompt of {tokens}, 99th percentile"
        yield what, partial(_beside, name, what, engine, [context] * streams, tokens)


def _decode(
    name: str, what: str, engine: Engine, found: Limits, contexts: list[int], steps: int, way: Way
) -> Row:
    """Measures decode steps of sequences that begin with these numbers of tokens."""
    sequences = engine.sequences([context + 1 for context in contexts], WARM + steps + 3)
    for each, context in zip(sequences, contexts, strict=True):
        each.num_computed = context
    engine.take(way)
    ahead = Ahead(engine, sequences) if way.ahead else None
    turn = partial(engine.step, sequences) if ahead is None else ahead.turn
    # A turn waits for the step before; were the device idle after it, nothing would be ahead.
    idle = torch.device("cpu") if way.ahead else engine.device
    with limits.peak_memory(engine.device) as peak:
        times = limits.timed(turn, idle, warm=WARM, least=steps, most=steps)
    if ahead is not None:
        ahead.end()
    seconds = statistics.median(times)
    batch = len(contexts)
    tokens = sum(contexts) + batch * (WARM + steps // 2)
    moved = ITEM * engine.shape.step_parameters + tokens * engine.shape.kv_bytes(ITEM)
    used = moved / seconds / found.bandwidth
    return Row(name, what, seconds, batch / seconds, used, peak())


def _prefill(name: str, what: str, engine: Engine, found: Limits, tokens: int) -> Row:
    """Measures a prompt that is computed in one step, several times."""
    (sequence,) = engine.sequences([tokens], 1)

    def anew() -> None:
        sequence.num_computed = 0
        del sequence.tokens[tokens:]
        engine.step([sequence])

    with limits.peak_memory(engine.device) as peak:
        times = limits.timed(anew, engine.device, warm=2, least=3, most=20)
    seconds = statistics.median(times)
    used = engine.shape.prefill_operations(tokens) / seconds / found.matmul
    return Row(name, what, seconds, tokens / seconds, used, peak())


def _beside(name: str, what: str, engine: Engine, contexts: list[int], tokens: int) -> Row:
    """Measures steps that decode streams and compute as much of a prompt as the engine would to
    keep `TARGET`: the time that 99 % of the streams' tokens come within."""
    budget = MixedStepBudget(TARGET, EngineSpec(engine="", model="").max_batch_tokens)
    lengths = [*(context + 1 for context in contexts), tokens]
    *rows, prompt = engine.sequences(lengths, WARM + tokens // LEAST + 1)
    for each, context in zip(rows, contexts, strict=True):
        each.num_computed = context
    times: list[float] = []

    def turn(size: int) -> float:
        chunks = [ScheduledChunk(each, each.num_computed, 1, True) for each in rows]
        if size:
            last = prompt.num_computed + size == tokens
            chunks.append(ScheduledChunk(prompt, prompt.num_computed, size, last))
        begin = time.perf_counter()
        result = engine.executor.execute(StepPlan(chunks))
        took = time.perf_counter() - begin
        for each, token in zip(rows, result.tokens, strict=False):
            each.num_computed += 1
            each.tokens.append(token)
        prompt.num_computed += size
        budget.note(size, took)
        return took

    with limits.peak_memory(engine.device) as peak:
        for _ in range(WARM):
            turn(0)
        while prompt.num_computed < tokens:
            times.append(turn(min(budget.tokens, tokens - prompt.num_computed)))
    seconds = sorted(times)[int(0.99 * len(times))]
    return Row(name, what, seconds, tokens / sum(times), seconds / TARGET, peak())


# ---------------------------------------------------------------- the report


def markdown(report: Report, *, dry: bool = False) -> str:
    """Returns the report as Markdown."""
    found = report.limits
    lines = ["# The torch engine on an accelerator", ""]
    lines += ["Made by `bench/gpu/run.sh`.", ""]
    if dry:
        lines += ["A dry run with tiny sizes: the numbers mean nothing.", ""]
    lines += [f"- {name}: {value}" for name, value in report.machine.items()]
    lines += [f"- {fact}" for fact in facts()]
    lines += [
        "",
        f"Copying moves {found.bandwidth / 1e9:,.1f} GB/s, read and written; the best product in "
        f"bfloat16 does {found.matmul / 1e12:,.2f} TFLOP/s.",
        "",
        "| bytes copied | GB/s | | rows of a product | TFLOP/s |",
        "|---|---|---|---|---|",
    ]
    copies = [f"{size >> 20} MiB | {rate / 1e9:,.1f}" for size, rate in found.copies.items()]
    products = [f"{rows} | {rate / 1e12:,.2f}" for rows, rate in found.products.items()]
    for copy, product in itertools.zip_longest(copies, products, fillvalue=" | "):
        lines.append(f"| {copy} | | {product} |")
    lines += [
        "",
        "A decode step of a batch × context and a kernel alone are compared with copying, a "
        "prefill with the product. Streams beside a prompt are compared with the target of "
        f"{TARGET * 1e3:.0f} ms; their tokens/s are the prompt's.",
        "",
        "| model | step | ms, median | tokens/s | of the limit | peak memory, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in report.rows:
        cells = (row.model, row.what, f"{row.seconds * 1e3:.3f}", f"{row.rate:,.0f}")
        lines.append(f"| {' | '.join(cells)} | {row.used:.1%} | {row.peak / 2**20:,.0f} |")
    for heading, texts in (
        ("Computed by:", [f"{model}: {kernels}" for model, kernels in report.kernels.items()]),
        ("Failed:", report.failures),
    ):
        if texts:
            lines += ["", heading, "", *(f"- {text}" for text in texts)]
    if report.left_out:
        lines += ["", "Not measured:", "", *(f"- {what}" for what in report.left_out)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
