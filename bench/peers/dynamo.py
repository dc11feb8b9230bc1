"""pdserve beside NVIDIA Dynamo, and beside the routers of SGLang and vLLM: rates, times, CPU.

    python -m bench.peers.dynamo --dynamo PYTHON [--sglang PYTHON] [--vllm PYTHON]
        [--rounds N] [--seconds S] [--rows ROW …] [--profile PY_SPY] [--write FILE]

Each PYTHON is the interpreter of an environment:

    pip install --no-deps ai-dynamo ai-dynamo-runtime
    pip install uvloop 'pydantic<=2.13.5' 'aiohttp<4' msgspec 'prometheus-client<1' pyzmq \\
        'redis<9' tqdm transformers 'zstandard<1' 'kubernetes<33' safetensors tokenizers
    pip install sglang-router
    pip install vllm-router

pdserve and Dynamo serve one model directory (a tokenizer and a template, no weights) with two
workers and a time model: Dynamo's mocker at --speedup-ratio 1000, and pdserve's `sim` with the
mocker's polynomials, 1,000 times as fast. Neither uses etcd or NATS: Dynamo has file discovery and
TCP, pdserve has gossip. Both know what each worker caches, and choose by it. Another arm has
Dynamo's fastest tokenizer, `fastokens`, for the rows with long prompts.

Frontend and router share one core. Dynamo's router is a part of its frontend. pdserve has one arm
that is placed like that (`--role=frontend --with-router`), by which aims are judged, and one whose
router is a process of its own. All else of a system shares the other core with the load generator.
Arms take turns within a round, after a run of each row that is not counted. Figures are medians
over rounds, ratios are medians of each round's ratio. On two quiet cores, five rounds take some
thirteen minutes.

No two requests have the same prompt: `bench/peers/frontends/load.py` says how they are made and how
answers are checked. The mocker does not send real tokens, but as many chunks. Dynamo's frontend
leaves Nagle's algorithm on, which costs a client that waits for each answer 40 ms; so the client
acknowledges at once (quickack), but in the rows that say otherwise.

The routers of SGLang and vLLM do less: they pass requests on to servers which speak HTTP, here two
that answer with ready-made bytes, and neither tokenise nor make text of tokens. They run in some
rows, with their `cache_aware` policy, and are in no ratio.

The mocker answers one choice, however many are asked for. So the row of two choices has no ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.frontend import build_generator, write_model
from bench.machine import facts
from bench.pages import kept
from bench.peers.frontends.arms import WORKERS, dynamo, model_of, pdserve, proxy
from bench.peers.frontends.load import ROWS, Load, vocabulary
from bench.peers.frontends.page import Findings, behind, page
from bench.peers.frontends.profile import take

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.peers.frontends.arms import System
    from bench.peers.frontends.load import Probe, Row, Sample

BY_HAND: Final = "## What it says"
"""The text from this heading on is written by hand and kept in the result."""
_WARM_SECONDS: Final = 0.3
_LONG: Final = 500
"""Words of a prompt from which on the tokenizer matters."""


def main() -> None:
    args = arguments()
    if shutil.which("taskset") is None or (os.cpu_count() or 1) < 2:
        sys.exit("this needs taskset and two cores")
    # Otherwise a SIGTERM, as `timeout` sends it, would leave all arms behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    with tempfile.TemporaryDirectory() as folder:
        text = page(run(args, Path(folder)), head(args))
    print(text)
    if args.write:
        args.write.write_text(text + kept(args.write, BY_HAND))


def run(args: argparse.Namespace, folder: Path) -> Findings:
    """Measures all arms side by side; idle ones cost nothing."""
    generator = build_generator(folder)
    load = Load(generator, folder, vocabulary())
    with contextlib.ExitStack() as stack:
        arms = list(start(args, stack, generator, model_of(write_model(folder / "model"))))
        rows = [row for row in ROWS if row.name in args.rows] or ROWS
        pairs = [(row, arm) for row in rows for arm in arms if takes_part(row, arm)]
        probes = {(row.name, arm.name): load.probe(row, arm) for row, arm in pairs}
        able = [(row, arm) for row, arm in pairs if not probes[row.name, arm.name].wrong]
        for row, arm in able:
            load.measure(row, arm, probes[row.name, arm.name], 1_000_000, _WARM_SECONDS)
        findings = Findings(
            ours=arms[0].name,
            apart=arms[1].name,
            rivals=[arm.name for arm in arms[2:] if arm.tokenises],
            samples=rounds(args, load, able, probes),
            probes=probes,
            systems=[
                (arm.name, arm.started, len(arm.front + arm.workers), arm.idle, arm.held())
                for arm in arms
            ],
        )
        if args.profile:
            profile(args, load, arms[0], findings)
    return findings


def start(
    args: argparse.Namespace, stack: contextlib.ExitStack, generator: Path, model: Path
) -> Iterator[System]:
    """Starts the arms; the first two are compared with the others that tokenise."""
    enter = stack.enter_context
    yield enter(pdserve(model, args.policy, inside=True))
    yield enter(pdserve(model, args.policy, inside=False))
    yield enter(dynamo(args.dynamo, model, "kv"))
    yield enter(dynamo(args.dynamo, model, "kv", "fastokens"))
    if args.sglang:
        launch = [str(args.sglang), "-m", "sglang_router.launch_router"]
        yield enter(proxy("SGLang's router", launch, generator))
    if args.vllm:
        program = str(args.vllm.parent / "vllm-router")
        yield enter(proxy("vLLM's router", [program], generator))


def takes_part(row: Row, arm: System) -> bool:
    """True if the row says something about this arm."""
    if not arm.tokenises:
        return row.proxies
    return "fastokens" not in arm.name or row.own + row.shared >= _LONG


def rounds(
    args: argparse.Namespace,
    load: Load,
    able: list[tuple[Row, System]],
    probes: dict[tuple[str, str], Probe],
) -> dict[tuple[str, str], list[Sample]]:
    """All rounds. The order of the arms turns round with each."""
    samples: dict[tuple[str, str], list[Sample]] = {(r.name, a.name): [] for r, a in able}
    for number in range(args.rounds):
        for row, arm in able if number % 2 == 0 else turned(able):
            seed = 1 + number * len(ROWS) + ROWS.index(row)
            sample = load.measure(row, arm, probes[row.name, arm.name], seed, args.seconds)
            samples[row.name, arm.name].append(sample)
            print(f"{number + 1} {row.name}, {arm.name}: {sample}", file=sys.stderr, flush=True)
    return samples


def turned(able: list[tuple[Row, System]]) -> list[tuple[Row, System]]:
    """The same rows in order, the arms of each in reverse."""
    return [pair for row in ROWS for pair in reversed([one for one in able if one[0] == row])]


def profile(args: argparse.Namespace, load: Load, arm: System, findings: Findings) -> None:
    """Takes profiles of the rows below 1."""
    folder = Path("build/profiles")
    folder.mkdir(parents=True, exist_ok=True)
    for row in behind(findings):
        findings.profiles[row.name] = take(args.profile, load, row, arm, folder)


def head(args: argparse.Namespace) -> list[str]:
    """The page's head."""
    versions = [f"Dynamo {version(args.dynamo, 'ai-dynamo')}"]
    versions += [f"sglang-router {version(args.sglang, 'sglang-router')}"] if args.sglang else []
    versions += [f"vllm-router {version(args.vllm, 'vllm-router')}"] if args.vllm else []
    about = __doc__.split("\n\n", 4)[4].strip()
    return [
        "# Beside Dynamo",
        "",
        f"{', '.join(versions)}; {WORKERS} workers each; {args.rounds} rounds of "
        f"{args.seconds:g} s. Repeat with `python -m bench.peers.dynamo`, whose docstring says how "
        "each is installed.",
        "",
        *about.split("\n"),
        "",
        *(f"- {fact}" for fact in facts()),
    ]


def version(python: Path, package: str) -> str:
    """The version of a package in another environment."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dynamo", type=Path, required=True, help="Python that has ai-dynamo")
    parser.add_argument("--sglang", type=Path, help="Python that has sglang-router")
    parser.add_argument("--vllm", type=Path, help="Python that has vllm-router")
    parser.add_argument("--policy", default="ttft", help="of pdserve")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.2)
    parser.add_argument(
        "--rows", nargs="+", choices=[row.name for row in ROWS], default=[], help="only these"
    )
    parser.add_argument("--profile", type=Path, help="py-spy, for the rows below 1.0")
    parser.add_argument("--write", type=Path, help="write the report there as Markdown")
    return parser.parse_args()


if __name__ == "__main__":
    main()
