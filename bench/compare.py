"""Compares two versions of pdserve: CPU time per operation of each role, side by side.

    python bench/compare.py v0.2.0 HEAD --write bench/results/compare.md

A version is a git revision or a folder with `pdserve` and `engines`. Each round starts one process
per version; they take turns operation by operation, and the one that begins changes from round to
round. A row shows the median and quartiles of the rounds' ratios. Where the quartiles lie further
apart than 3 %, the row also has the ratio of executed instructions, if valgrind is installed.
Both versions run without the native extension, as their C++ sources may differ.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.machine import facts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT: Final = Path(__file__).parents[1]
CHILD: Final = ROOT / "bench" / "compare_arms" / "operations.py"
MIN_ROUNDS: Final = 9
MAX_SPREAD: Final = 0.03
"""Largest distance of the quartiles, as a share of the median, at which CPU time counts as steady.
"""
CALLGRIND_SHARE: Final = 0.1
"""Share of a row's count that runs under callgrind, which is some fifty times slower."""


@dataclass(frozen=True)
class Row:
    """An operation to measure."""

    name: str
    """The operation's key in `compare_arms/operations.py`."""
    label: str
    count: int
    """Operations per round, each version."""


ROWS: Final = (
    Row("frontend_request", "frontend: a chat request of one token, whole", 600),
    Row("frontend_token", "frontend: a streamed token, each alone", 10_240),
    Row("router", "router: a decision by prefix, 16 workers, and its booking", 3000),
    Row("scheduler", "scheduler: schedule and complete a token, 256 sequences", 65_536),
    Row("bus", "bus: a request and its answer, link in memory, both ends", 10_000),
    Row("engine_port", "engine port: submit to first delta, instant engine, both ends", 4000),
)


@dataclass
class Finding:
    """The measurements of one row; seconds per operation, in the order of rounds."""

    first: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)
    instructions: tuple[float, float] | None = None
    """Instructions per operation of each version; None: not counted."""

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Quartiles of the ratio of the second version to the first."""
        ratios = [b / a for a, b in zip(self.first, self.second, strict=True)]
        if len(ratios) < 2:
            return ratios[0], ratios[0], ratios[0]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return low, middle, high

    @property
    def unsteady(self) -> bool:
        """True if the quartiles are too far apart."""
        low, middle, high = self.quartiles
        return (high - low) / middle > MAX_SPREAD


# ---------------------------------------------------------------- the two versions


@contextlib.contextmanager
def unpacked(version: str) -> Iterator[Path]:
    """Gives the folder of a version; takes a revision from this repository's history."""
    if (Path(version) / "pdserve").is_dir():
        yield Path(version).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "source.tar")
        command = ["git", "archive", "--output", str(archive), version, "pdserve", "engines"]
        subprocess.run(command, cwd=ROOT, check=True)
        shutil.unpack_archive(archive, folder, filter="data")
        yield Path(folder)


def child_command(tree: Path, seed: int) -> tuple[list[str], dict[str, str]]:
    """Program and environment of a process that imports this tree's pdserve."""
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(tree), str(tree / "engines"))),
        "PYTHONHASHSEED": str(seed),
        "PDSERVE_PURE": "1",
    }
    return [sys.executable, "-P", str(CHILD)], environ


@contextlib.contextmanager
def child(tree: Path, seed: int) -> Iterator[subprocess.Popen[str]]:
    """A process that measures operations of one tree until its input ends."""
    command, environ = child_command(tree, seed)
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryDirectory() as elsewhere,
        subprocess.Popen(
            command, env=environ, cwd=elsewhere, stdin=pipe, stdout=pipe, text=True
        ) as process,
    ):
        yield process
        assert process.stdin is not None
        process.stdin.close()


def ask(process: subprocess.Popen[str], name: str, count: int) -> float:
    """CPU seconds per operation. Raises `RuntimeError` if the process has failed."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{name} {count}\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"{name} failed; its message is above")
    return float(answer)


# ---------------------------------------------------------------- measuring


def compare(first: Path, second: Path, rounds: int, scale: float = 1.0) -> dict[str, Finding]:
    """CPU time of all rows; the first version begins in even rounds."""
    findings = {row.name: Finding() for row in ROWS}
    for number in range(rounds):
        with child(first, number) as one, child(second, number) as other:
            for row in ROWS:
                finding, count = findings[row.name], max(1, round(row.count * scale))
                turns = [(one, finding.first), (other, finding.second)]
                for process, found in turns if number % 2 == 0 else reversed(turns):
                    found.append(ask(process, row.name, count))
    return findings


def count_instructions(tree: Path, row: Row) -> float:
    """Instructions per operation: a run of twice the count, less a run of the count."""
    count = round(row.count * CALLGRIND_SHARE)
    once, twice = (_collected(tree, row.name, count * times) for times in (1, 2))
    return (twice - once) / (count * 1.1)  # the warm-up is a tenth and doubles, too


def _collected(tree: Path, name: str, count: int) -> int:
    command, environ = child_command(tree, 0)
    done = subprocess.run(
        ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", *command],
        input=f"{name} {count}\n",
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"Collected\s*:\s*(\d+)", done.stderr)
    if found is None:
        raise RuntimeError(f"callgrind gave no count: {done.stderr[-500:]}")
    return int(found[1])


# ---------------------------------------------------------------- the page


def page(names: Sequence[str], findings: dict[str, Finding], notes: Sequence[str]) -> str:
    """The result as Markdown."""
    first, second = names
    lines = [
        "# Two versions compared",
        "",
        f"CPU time per operation, all threads of the process: {first} and {second}. Ratios are "
        f"{second} to {first}, below 1 is cheaper; median and quartiles of each round's ratio. "
        f"Repeat with `python bench/compare.py {first} {second}`.",
        "",
        *(f"- {fact}" for fact in (*facts(), *notes)),
        "",
        f"| operation | {first}, us | {second}, us | ratio | quartiles | instructions |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in ROWS:
        finding = findings[row.name]
        low, middle, high = finding.quartiles
        one, other = (statistics.median(times) * 1e6 for times in (finding.first, finding.second))
        counts = finding.instructions
        counted = "" if counts is None else f"{counts[1] / counts[0]:.3f}"
        lines.append(
            f"| {row.label} | {one:.2f} | {other:.2f} | {middle:.3f} | {low:.3f} to {high:.3f} "
            f"| {counted} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, write."""
    args = _arguments()
    load = os.getloadavg()[0]
    valgrind = shutil.which("valgrind") is not None
    with unpacked(args.first) as first, unpacked(args.second) as second:
        compare(first, second, rounds=1, scale=0.01)  # compiles both
        findings = compare(first, second, args.rounds)
        for row in ROWS:
            finding = findings[row.name]
            if finding.unsteady and valgrind and not args.no_callgrind:
                counts = [count_instructions(tree, row) for tree in (first, second)]
                finding.instructions = counts[0], counts[1]
    notes = [
        f"{args.rounds} rounds; load average {load:.1f} at the start",
        "Both without the native extension (`PDSERVE_PURE=1`)",
        f"Instructions: by callgrind, where quartiles are more than {MAX_SPREAD:.0%} apart"
        if valgrind and not args.no_callgrind
        else "Instructions were not counted: " + ("not wanted" if valgrind else "no valgrind"),
    ]
    text = page((args.first, args.second), findings, notes)
    print(text)
    if args.write:
        args.write.write_text(text, encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("first", help="a git revision, or a folder")
    parser.add_argument("second", help="likewise")
    parser.add_argument("--rounds", type=_rounds, default=MIN_ROUNDS, help="9 at least")
    parser.add_argument("--no-callgrind", action="store_true", help="do not count instructions")
    parser.add_argument("--write", type=Path, help="write the page there")
    return parser.parse_args()


def _rounds(text: str) -> int:
    if int(text) < MIN_ROUNDS:
        raise argparse.ArgumentTypeError(f"{MIN_ROUNDS} at least")
    return int(text)


if __name__ == "__main__":
    main()
