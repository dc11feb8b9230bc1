"""Asks a GPU what the engine's design depends on: launches, products, reading, attention, sharing.

    python bench/gpu/probe.py --out DIR               # gpu_probe.json, in at most 150 s
    python bench/gpu/probe.py --ask engine decode     # only these questions
    python bench/gpu/probe.py --dry                   # tiny sizes, on whatever there is

The questions run one after the other in a process of their own. One that fails, takes longer than
its limit or leaves the device unusable ends that process; another one continues with the rest. A
row without a value says why. Nothing is a pass or fail.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2] / "engines"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from bench.gpu import limits
from bench.gpu.probes import attention, decoding, launches, products, reading, sharing
from bench.gpu.probes.base import Probe, Row, is_fatal, reason
from bench.machine import facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and how long it may take."""

    ask: Callable[[Probe], Iterator[Row]]
    limit: float
    """Seconds; the process is ended after them."""


QUESTIONS = {
    "default": Question(attention.ask_default, 20),
    "engine": Question(decoding.ask_engine, 60),
    "large_engine": Question(decoding.ask_large_engine, 60),
    "decode": Question(attention.ask_decode, 40),
    "prefill": Question(attention.ask_prefill, 40),
    "products": Question(products.ask_products, 40),
    "launches": Question(launches.ask_launches, 30),
    "reading": Question(reading.ask_reading, 20),
    "pages": Question(reading.ask_pages, 40),
    "graphs": Question(launches.ask_graphs, 20),
    "dma_buf": Question(sharing.ask_dma_buf, 15),
    "ipc": Question(sharing.ask_ipc, 30),
}
"""In the order in which they are asked; those that may hurt the device come last."""
STARTING = 5.0
"""Seconds that have to be left for another process to be started."""


@dataclass(slots=True)
class Answer:
    """What came of one question."""

    rows: list[Row] = field(default_factory=list)
    seconds: float | None = None
    """How long it took; None: it did not end."""
    failure: str = ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Asks, prints a table, writes JSON."""
    options = _arguments(arguments)
    if options.child:
        _answer(options)
        return
    begin = time.perf_counter()
    answers = _ask_all(options)
    device = torch.device(options.device)
    report = {
        "machine": limits.machine(device) | {"seconds": f"{time.perf_counter() - begin:.0f}"},
        "facts": list(facts()),
        "dry": options.dry,
        "answers": {name: asdict(answer) for name, answer in answers.items()},
    }
    print(table(answers))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report, indent=1, ensure_ascii=False)
        (options.out / "gpu_probe.json").write_text(text + "\n")


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ask", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--budget", type=float, default=150.0, help="seconds for all questions")
    parser.add_argument("--out", type=Path, help="folder for gpu_probe.json")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, to see that it works")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


# ---------------------------------------------------------------- the process that watches


def _ask_all(options: argparse.Namespace) -> dict[str, Answer]:
    """Starts a process for all questions, and another for those that it did not come to."""
    deadline = time.monotonic() + options.budget
    answers: dict[str, Answer] = {}
    left = list(options.ask)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answers"
        while left and deadline - time.monotonic() > STARTING:
            file.write_text("")
            status = _run(options, left, file, deadline - time.monotonic())
            found = read_answers(file.read_text(), status)
            answers |= found
            if not found:
                answers[left[0]] = Answer(failure=f"not begun: the process ended ({status})")
            left = [name for name in left if name not in answers]
    return answers | {name: Answer(failure="no time was left") for name in left}


def _run(options: argparse.Namespace, names: list[str], file: Path, seconds: float) -> str:
    """Returns how the process ended, in words."""
    command = [sys.executable, __file__, "--child", str(file), "--device", options.device]
    command += ["--ask", *names, *(["--dry"] if options.dry else [])]
    child = subprocess.Popen(command)
    try:
        return f"exit status {child.wait(seconds)}"
    except subprocess.TimeoutExpired:
        return "no time was left"
    finally:
        child.kill()
        child.wait()


def read_answers(text: str, status: str) -> dict[str, Answer]:
    """Returns the answers that a process wrote, line by line. The last one may lack its end; then
    `status` says why."""
    answers: dict[str, Answer] = {}
    for line in text.splitlines():
        told = json.loads(line)
        answer = answers.setdefault(told["question"], Answer())
        if "row" in told:
            answer.rows.append(Row(**told["row"]))
        if "seconds" in told:
            answer.seconds, answer.failure = told["seconds"], told["failure"]
    for answer in answers.values():
        if answer.seconds is None:
            answer.failure = status
    return answers


# ---------------------------------------------------------------- the process that asks


def _answer(options: argparse.Namespace) -> None:
    """Asks until all is answered, or until the device is unusable."""
    probe = Probe(torch.device(options.device), options.dry)
    if options.dry:
        torch.set_num_threads(1)
    with options.child.open("a") as file:
        for name in options.ask:
            faulthandler.dump_traceback_later(QUESTIONS[name].limit, exit=True)
            usable = _answer_one(name, probe, file)
            if not usable:
                os._exit(1)
            _clean(probe)
    faulthandler.cancel_dump_traceback_later()


def _answer_one(name: str, probe: Probe, file: IO[str]) -> bool:
    """Returns False if the device is unusable now."""

    def tell(**fields: Any) -> None:
        file.write(json.dumps({"question": name, **fields}) + "\n")
        file.flush()

    begin = time.perf_counter()
    failure, usable = "", True
    tell()
    try:
        for row in QUESTIONS[name].ask(probe):
            tell(row=asdict(row))
    except Exception as error:
        failure, usable = reason(error), not is_fatal(error)
    seconds = time.perf_counter() - begin
    print(f"{name}: {seconds:.1f} s {failure}", flush=True)
    tell(seconds=seconds, failure=failure)
    return usable


def _clean(probe: Probe) -> None:
    gc.collect()
    if probe.cuda:
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- the report


def table(answers: dict[str, Answer]) -> str:
    """Returns all rows as Markdown."""
    lines = ["| question | what | value | note |", "|---|---|---|---|"]
    for name, answer in answers.items():
        lines += [f"| {name} | {_cells(row)} |" for row in answer.rows]
        if answer.failure:
            lines.append(f"| {name} | | | {answer.failure} |")
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> str:
    value = "" if row.value is None else f"{row.value:,.4g} {row.unit}".strip()
    return f"{row.what} | {value} | {row.note}"


if __name__ == "__main__":
    main()
