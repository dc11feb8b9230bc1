"""Measures the KV tiers of one worker against limits of the same run.

    python -m bench.tiers [--rounds N] [--dir DIRECTORY]

    copies    blocks between device pool and host arena (on a CPU both are host memory), against
              one copy of as many bytes
    disk      records of 1.25 MiB written, read, and read while others are written, against fio if
              it is installed, else against plain reads of the same size by as many threads
    pulls     blocks fetched from another worker's pool, against a handoff of as many
    answers   time to the first token of prompts of 8,000 tokens: computed, from the device, from
              host and disk; against what was predicted before the request
    overlap   a prefill that begins before all layers of its prefix have come, in simulated time
    cold      a load of prompts that share nothing, with tiers and without

Arms take turns within a round; a figure is the median over rounds, with the lowest and the highest.
The run takes about ten minutes and writes bench/results/tiers.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from array import array
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import pdserve
from bench.machine import facts
from bench.pages import kept
from bench.tier_overlap import rows as overlap_rows
from bench.tier_pair import Pair
from pdserve.clock import SystemClock
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.tiers import fetch_planner
from pdserve.kv.storage import BlockMemory
from pdserve.kv.tiers.block import TierBlock
from pdserve.kv.tiers.disk.fingerprint import Fingerprint
from pdserve.kv.tiers.disk.tier import DiskTier
from pdserve.kv.tiers.job_runner import MemoryCopier
from pdserve.kv.tiers.planner import Plan, plan
from pdserve.messages.engine import EngineSpec, StepOutput, Submit
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.messages.tiers import TierSpec
from pdserve.token_ids import token_ids
from pdserve.transfer.copying import copy_runs
from pdserve_engines.torch.executor import TorchExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdserve.messages.request import FirstTokenStats

RESULT = Path(__file__).parent / "results" / "tiers.md"
_BY_HAND: Final = "## What is missed, and why"
"""The text from this heading on is written by hand and kept in the result."""
COPY_TOTAL: Final = 128 << 20
SIZES: Final = (64 << 10, 128 << 10, 512 << 10, 1280 << 10, 2 << 20)
RECORD: Final = 1280 << 10
RECORDS: Final = 200
READERS: Final = 4
MODEL: Final = Path(pdserve.__file__).parent / "bundled"
PROMPT: Final = 8000
"""Tokens of the prompts that are answered, of the bundled model with longer positions."""
LENGTH: Final = 8192
PROMPTS: Final = 2
"""Prompts of each source in a round."""
PULLS: Final = (16 << 20, 64 << 20)


class Figures:
    """Values of one row over the rounds."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def count(self, name: str) -> int:
        """Number of values."""
        return len(self._values.get(name, ()))

    def add(self, name: str, value: float) -> None:
        self._values.setdefault(name, []).append(value)

    def text(self, name: str, form: str = "{:.2f}") -> str:
        """Median, lowest and highest."""
        values = sorted(self._values[name])
        parts = (statistics.median(values), values[0], values[-1])
        middle, low, high = (form.format(value) for value in parts)
        return f"{middle} ({low} to {high})"

    def ratio(self, upper: str, lower: str) -> str:
        """Median of the ratios within a round; of the medians, where a round has several values."""
        over, under = self._values[upper], self._values[lower]
        if len(over) != len(under):
            return f"{statistics.median(over) / statistics.median(under):.2f}"
        values = sorted(a / b for a, b in zip(over, under, strict=True))
        return f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# ---------------------------------------------------------------- copies


def copies(rounds: int) -> list[str]:
    """Rows: GB/s of blocks at random places, and their share of one plain copy."""
    pool, arena = BlockMemory(1, (2 * COPY_TOTAL,)), BlockMemory(1, (2 * COPY_TOTAL,))
    source, target = pool.view(), arena.view()
    source[:] = os.urandom(1 << 20) * (len(source) >> 20)
    target[:] = source
    rows = [_copies_of(size, source, target, rounds) for size in SIZES]
    source.release()
    target.release()
    pool.close()
    arena.close()
    return rows


def _copies_of(size: int, source: memoryview, target: memoryview, rounds: int) -> str:
    count = COPY_TOTAL // size
    places = random.Random(size)
    figures = Figures()
    copier = MemoryCopier(source[:], target[:], size)
    whole = array("q", [0]), array("q", [COPY_TOTAL])
    each = max(1, (16 << 20) // size)
    for _ in range(rounds):
        blocks = places.sample(range(2 * count), count)
        frames = places.sample(range(2 * count), count)

        def out(blocks: Sequence[int] = blocks, frames: Sequence[int] = frames) -> None:
            for first in range(0, count, each):
                copier.copy_out(blocks[first : first + each], frames[first : first + each])

        def back(blocks: Sequence[int] = blocks, frames: Sequence[int] = frames) -> None:
            for first in range(0, count, each):
                copier.copy_in(frames[first : first + each], blocks[first : first + each])

        figures.add(
            "limit",
            COPY_TOTAL
            / timed(lambda: copy_runs(target, source, whole[0], whole[0], whole[1], True)),
        )
        figures.add("out", COPY_TOTAL / timed(out))
        figures.add("back", COPY_TOTAL / timed(back))
    copier.close()
    return (
        f"| {size >> 10} KiB | {_gb(figures, 'limit')} | {_gb(figures, 'out')} | "
        f"{figures.ratio('out', 'limit')} | {figures.ratio('back', 'limit')} |"
    )


def _gb(figures: Figures, name: str) -> str:
    scaled = Figures()
    for value in figures._values[name]:
        scaled.add(name, value / 1e9)
    return scaled.text(name)


# ---------------------------------------------------------------- disk


def disk(directory: Path, rounds: int) -> list[str]:
    """Rows: MB/s of records, and their share of the limit."""
    figures = Figures()
    for number in range(rounds):
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            limit = _fio(Path(folder), mixed=False) or _plain_reads(Path(folder))
            mixed = _fio(Path(folder), mixed=True)
            figures.add("limit", limit)
            if mixed:
                figures.add("mixed limit", mixed)
            for name, value in _tier_rates(Path(folder) / "tier", number).items():
                figures.add(name, value)
    peer = "fio" if shutil.which("fio") else "plain reads"
    rows = [
        f"| limit: {peer}, {READERS} threads | {_mb(figures, 'limit')} | |",
        f"| records written | {_mb(figures, 'write')} | |",
        f"| records read, {READERS} threads | {_mb(figures, 'read')} | "
        f"{figures.ratio('read', 'limit')} |",
        f"| read while written | {_mb(figures, 'mixed')} | "
        + (
            f"{figures.ratio('mixed', 'mixed limit')} of fio with 30 % writes |"
            if "mixed limit" in figures._values
            else f"{figures.ratio('mixed', 'limit')} of reads alone |"
        ),
    ]
    return rows


def _mb(figures: Figures, name: str) -> str:
    scaled = Figures()
    for value in figures._values[name]:
        scaled.add(name, value / 1e6)
    return scaled.text(name, "{:.0f}")


def _fio(folder: Path, *, mixed: bool) -> float:
    """Bytes per second that fio reads with this record size; 0 without fio."""
    if shutil.which("fio") is None:
        return 0.0
    words = [
        "fio",
        "--name=tiers",
        f"--directory={folder}",
        f"--bs={RECORD // 1024}k",
        "--direct=1",
        f"--size={RECORD * RECORDS // READERS // 1024}k",
        f"--numjobs={READERS}",
        "--ioengine=psync",
        "--group_reporting",
        "--output-format=json",
        "--end_fsync=0",
        "--rw=" + ("randrw" if mixed else "randread"),
        "--rwmixread=70",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        return 0.0
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


def _plain_reads(folder: Path) -> float:
    """Bytes per second of reads at random places of one file, around the page cache."""
    path = folder / "plain"
    path.write_bytes(os.urandom(1 << 20) * (RECORD * RECORDS >> 20))
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    os.fsync(fd)
    count = path.stat().st_size // RECORD
    buffers = [BlockMemory(1, (RECORD,)) for _ in range(READERS)]
    order = random.Random(1).sample(range(count), count)

    def read(own: int) -> None:
        view = buffers[own].view()
        for place in order[own::READERS]:
            os.preadv(fd, [view], place * RECORD)
        view.release()

    seconds = timed(lambda: _threads(read))
    os.close(fd)
    for buffer in buffers:
        buffer.close()
    return count * RECORD / seconds


def _threads(work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(own,)) for own in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _tier_rates(root: Path, number: int) -> dict[str, float]:
    fingerprint = Fingerprint("bench", b"secret", RECORD, "bench", "uint8")
    tier = DiskTier.open(root, 3 * RECORD * RECORDS, fingerprint, clock=SystemClock())
    payload = BlockMemory(8, (RECORD,))
    payload.view()[:] = os.urandom(1 << 20) * (8 * RECORD >> 20)
    names = [number.to_bytes(4, "big") + place.to_bytes(12, "big") for place in range(2 * RECORDS)]
    first, second = names[:RECORDS], names[RECORDS:]
    seconds = timed(lambda: _write(tier, first, payload))
    rates = {"write": RECORD * RECORDS / seconds}
    order = random.Random(number).sample(first, RECORDS)
    rates["read"] = RECORD * RECORDS / timed(lambda: _read(tier, order))
    writing = threading.Thread(target=_write, args=(tier, second, payload))
    writing.start()
    rates["mixed"] = RECORD * RECORDS / timed(lambda: _read(tier, order))
    writing.join()
    tier.close()
    payload.close()
    return rates


def _write(tier: DiskTier, names: Sequence[bytes], payload: BlockMemory) -> None:
    now = time.monotonic()
    for first in range(0, len(names), 8):
        blocks = [TierBlock(name, bytes(16)) for name in names[first : first + 8]]
        batch = tier.index.append(blocks, RECORD, now)
        assert batch is not None
        tier.files.write(batch, [payload.view(place) for place in range(len(blocks))])
        tier.index.written(batch, now)
        for command in tier.index.commands(now):
            tier.files.run(command)
            tier.index.finished(command, now)


def _read(tier: DiskTier, names: Sequence[bytes]) -> None:
    places = [(name, tier.index.place(name)) for name in names]
    buffers = [BlockMemory(1, (RECORD,)) for _ in range(READERS)]

    def read(own: int) -> None:
        view = buffers[own].view()
        for name, place in places[own::READERS]:
            assert place is not None
            tier.files.read(place, name, view)
        view.release()

    _threads(read)
    for buffer in buffers:
        buffer.close()


# ---------------------------------------------------------------- pulls


def pulls(rounds: int) -> list[str]:
    """Rows: GB/s of a pull, and its share of a handoff of as many bytes."""
    rows = []
    block = 32 * _token_bytes()
    for backend in ("shm", "tcp"):
        both = Pair(MODEL, backend, 5 * PULLS[-1], 2048)
        for size in PULLS:
            figures = Figures()
            for number in range(rounds + 1):
                hashes = both.fill(100 * PULLS.index(size) + number, size // block)
                first = both.hand_off(len(hashes)) if number % 2 else 0.0
                pulled = both.pull(hashes)
                handed = first or both.hand_off(len(hashes))
                if number:  # the first one connects
                    figures.add("pull", size / pulled)
                    figures.add("handoff", size / handed)
            rows.append(
                f"| {backend} | {size >> 20} MiB | {_gb(figures, 'handoff')} | "
                f"{_gb(figures, 'pull')} | {figures.ratio('pull', 'handoff')} |"
            )
        both.close()
    return rows


# ---------------------------------------------------------------- answers


class Core:
    """The torch engine's core with the bundled model, stepped in this thread."""

    def __init__(
        self, tiers: TierSpec | None, kv_memory: int, model: Path = MODEL, length: int = 2048
    ) -> None:
        self.core = EngineCore(TorchExecutor(), SystemClock())
        self.core.load(
            EngineSpec(
                engine="torch",
                model=str(model),
                device="cpu",
                kv_memory=kv_memory,
                max_model_len=length,
                hash_secret=b"bench",
                tiers=tiers,
            ),
            lambda progress: None,
        )
        self._handles = 0

    def submit(self, prompt: list[int], tokens: int = 1) -> int:
        self._handles += 1
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(
            request_id=str(self._handles), model="m", prompt=token_ids(prompt), sampling=sampling
        )
        self.core.handle(Submit(handle=self._handles, request=request))
        return self._handles

    def outputs(self) -> Iterator[tuple[float, StepOutput]]:
        """Steps, until nothing is left to do."""
        while True:
            for event in self.core.step():
                if isinstance(event, StepOutput):
                    yield time.perf_counter(), event
            if not self.core.has_work:
                if not self.core.scheduler.handles():
                    return
                time.sleep(0.0002)

    def first_token(self, prompt: list[int]) -> tuple[float, FirstTokenStats]:
        """Seconds to the first token, and what is told with it."""
        began = time.perf_counter()
        self.submit(prompt)
        for at, output in self.outputs():
            started = output.deltas[0].started
            if started is not None:
                seconds, found = at - began, started
        return seconds, found

    def settle(self, seconds: float) -> None:
        """Let copies and writes go on for a while."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            self.core.step()
            time.sleep(0.005)


def answers(directory: Path, rounds: int) -> list[str]:
    """Rows: milliseconds to the first token, by where the prefix was."""
    figures = Figures()
    with tempfile.TemporaryDirectory(dir=directory) as home:
        model = _longer_model(Path(home) / "model")
        for number in range(rounds):
            with tempfile.TemporaryDirectory(dir=directory) as folder:
                _answers(model, Path(folder), number, figures)
            _peer_answers(model, number, figures)
    rows = []
    for name in ("computed", "device", "host", "disk", "peer"):
        predicted, late = f"{name} predicted", figures.count(f"{name} late")
        if not figures.count(name):
            rows.append(f"| {name} | | | | | {late} |")
            continue
        rows.append(
            f"| {name} | {figures.text(name, '{:.1f}')} | "
            f"{figures.text(predicted, '{:.1f}')} | {figures.ratio(name, predicted)} | "
            f"{figures.ratio(name, 'computed')} | {late} |"
        )
    return rows


def _longer_model(folder: Path) -> Path:
    """The bundled model for longer prompts. What it says about them does not matter here."""
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LENGTH}))
    return folder


def _prompts(seed: int, count: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(300, 900) for _ in range(PROMPT)] for _ in range(count)]


def _noted(
    name: str,
    core: EngineCore,
    ask: Callable[[], tuple[float, FirstTokenStats]],
    figures: Figures,
) -> None:
    """Ask for a prompt whose prefix is at this place, and note its time beside the prediction. What
    did not come as a whole is counted as late."""
    planned: list[Plan] = []

    def watched(*args: Any) -> Plan:
        planned.append(plan(*args))
        return planned[-1]

    with patch(f"{fetch_planner.__name__}.plan", watched):
        cached = 0 if name == "computed" else PROMPT - 32
        alone = core._step_cost.prefill(PROMPT, cached)
        seconds, started = ask()
    place: set[str] = {each.source for each in started.sources} or {"device"}
    if name != "computed" and (place != {name} or started.cached_tokens < cached):
        figures.add(f"{name} late", 1.0)
        return
    figures.add(name, 1e3 * seconds)
    here = name in {"computed", "device"} or not planned
    figures.add(f"{name} predicted", 1e3 * (alone if here else planned[-1].finish))


def _answers(model: Path, folder: Path, number: int, figures: Figures) -> None:
    prompts = _prompts(number, PROMPTS)
    tiers = TierSpec(
        host_bytes=256 << 20, disk_path=str(folder), disk_bytes=1 << 30, disk_owner="bench"
    )
    room = (PROMPT + 448) * _token_bytes()
    core = Core(tiers, room, model, LENGTH)
    _warm(core.first_token, 10_000)
    for prompt in prompts:
        for place in ("computed", "device"):
            _noted(place, core.core, partial(core.first_token, prompt), figures)
        core.settle(0.5)
    core.settle(2.0)
    for prompt in prompts:
        _noted("host", core.core, partial(core.first_token, prompt), figures)
        core.settle(0.5)
    core.core.close()
    core = Core(tiers, room, model, LENGTH)
    _warm(core.first_token, 20_000)
    for prompt in prompts:
        _noted("disk", core.core, partial(core.first_token, prompt), figures)
        core.settle(0.5)
    core.core.close()


def _peer_answers(model: Path, number: int, figures: Figures) -> None:
    """The owner's blocks hold random numbers: it need not compute them. It serves a quarter of its
    pool at once, so that is large."""
    both = Pair(model, "shm", 5 * PROMPT * _token_bytes(), LENGTH)
    _warm(both.first_token, 30_000)
    for prompt in _prompts(number, PROMPTS):
        hashes = both.o.hashes(prompt)
        both.give(hashes)
        ask = partial(both.first_token, prompt, len(hashes))
        _noted("peer", both.r.core, ask, figures)
    both.close()


def _warm(ask: Callable[[list[int]], object], seed: int) -> None:
    """Have a core compute short prompts and long: before, it does not know what that costs."""
    for turn, length in enumerate((64, 500, 2000, PROMPT, 4000, PROMPT)):
        ask(_prompts(seed + turn, 1)[0][:length])


def _token_bytes() -> int:
    config = json.loads((MODEL / "config.json").read_text())
    heads = config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * 2 * heads * dim * 4)


# ---------------------------------------------------------------- a cold load


def cold(directory: Path, rounds: int) -> list[str]:
    """Rows: tokens per second and the time between tokens, without and with tiers."""
    figures = Figures()
    for number in range(rounds):
        for name in ("without", "with") if number % 2 else ("with", "without"):
            with tempfile.TemporaryDirectory(dir=directory) as folder:
                rate, itl, cpu = _cold(Path(folder) if name == "with" else None, number)
            figures.add(f"{name} rate", rate)
            figures.add(f"{name} cpu", 1e3 * cpu)
            figures.add(f"{name} itl", 1e3 * itl)
    return [
        f"| output tokens/s | {figures.text('without rate', '{:.0f}')} | "
        f"{figures.text('with rate', '{:.0f}')} | {figures.ratio('with rate', 'without rate')} |",
        f"| CPU of all threads, ms per token | {figures.text('without cpu')} | "
        f"{figures.text('with cpu')} | {figures.ratio('with cpu', 'without cpu')} |",
        f"| time between tokens, p99, ms | {figures.text('without itl', '{:.1f}')} | "
        f"{figures.text('with itl', '{:.1f}')} | {figures.ratio('with itl', 'without itl')} |",
    ]


def _cold(folder: Path | None, number: int) -> tuple[float, float, float]:
    """Tokens per second, the 99th percentile between two tokens, CPU seconds per token."""
    tiers = None
    if folder is not None:
        tiers = TierSpec(host_bytes=128 << 20, disk_path=str(folder), disk_bytes=1 << 30)
    core = Core(tiers, 2048 * _token_bytes())
    draw = random.Random(number)
    last: dict[int, float] = {}
    gaps: list[float] = []
    tokens = 0
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(12):
        for _ in range(6):
            core.submit([draw.randrange(300, 900) for _ in range(192)], 32)
        for at, output in core.outputs():
            for delta in output.deltas:
                tokens += len(delta.tokens)
                if delta.handle in last:
                    gaps.append(at - last[delta.handle])
                last[delta.handle] = at
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    core.core.close()
    gaps.sort()
    return tokens / seconds, gaps[int(0.99 * len(gaps))], cpu / tokens


def main() -> None:
    """Measure everything and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args()
    page = [
        "# KV tiers against their limits",
        "",
        *(f"- {fact}" for fact in facts()),
        f"- Load of the machine at the start: {os.getloadavg()[0]:.1f}",
        f"- Command: `python -m bench.tiers --rounds {given.rounds}`; medians, lowest to highest",
        "",
        "## Copies between the device pool and the host arena",
        "",
        "Blocks at random places, 128 MiB in jobs of 16 MiB, against one copy of 128 MiB.",
        "",
        "| block | one copy, GB/s | blocks out, GB/s | out / limit | back / limit |",
        "|---|---|---|---|---|",
        *copies(given.rounds),
        "",
        "## Disk",
        "",
        f"{RECORDS} records of {RECORD >> 10} KiB; checksums are compared at each read.",
        "",
        "| what | MB/s | share of the limit |",
        "|---|---|---|",
        *disk(given.dir, given.rounds),
        "",
        "## A pull against a handoff",
        "",
        "GB/s between two cores of one process, from the question to the last checked block. The",
        "handoff is one part of as many blocks over the same path, with all checksums compared.",
        "",
        "| path | bytes | handoff | pull | pull / handoff |",
        "|---|---|---|---|---|",
        *pulls(given.rounds),
        "",
        "## Time to the first token",
        "",
        f"Prompts of {PROMPT:,} tokens of the bundled model on the CPU; all but the last block was",
        "where the row says; the peer is another core of this process, over shm. Milliseconds,",
        "predicted before the request. Late:",
        "number of prompts of which a part came after its deadline and was computed.",
        "",
        "| prefix | measured | predicted | measured / predicted | measured / computed | late |",
        "|---|---|---|---|---|---|",
        *answers(given.dir, given.rounds),
        "",
        "## Prefill that begins before all layers have come",
        "",
        "A simulated worker in simulated time (`bench/tier_overlap.py`): 8,000 tokens come from",
        "host memory in as long as it takes to compute the other 1,000. Milliseconds to the first",
        "token.",
        "",
        "| groups of layers | whole blocks | in groups | less | ideal |",
        "|---|---|---|---|---|",
        *overlap_rows(),
        "",
        "## A load that shares nothing",
        "",
        "12 times 6 prompts of 192 tokens, 32 tokens each, on a device pool of 2,048 tokens: every",
        "block is copied to the host and written to disk, and none is used again.",
        "",
        "| | without tiers | with host and disk | with / without |",
        "|---|---|---|---|",
        *cold(given.dir, given.rounds),
        "",
    ]
    text = "\n".join(page) + kept(RESULT, _BY_HAND)
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
