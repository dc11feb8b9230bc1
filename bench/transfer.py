"""Measures moving KV blocks between two processes: pdserve, the limits, other engines.

    python bench/transfer.py [--rounds N] [--peers PYTHON] [--iperf3 PATH] [--rdma-json FILE]

Every arm has two processes with a pool of 512 MiB each. Blocks of 64 KiB go from random places to
random places, another part of the pools each time. All arms take turns in the same rounds, and each
round begins with another arm; the processes of the others are stopped, since NIXL's and Mooncake's
have threads that never sleep. A figure is the median over rounds of the medians within a round;
ratios are medians of the ratios within a round. After each measurement the last block must be at
the other end. The run takes about four minutes and writes bench/results/transfer.md.

memcpy, bare sockets and pdserve need nothing. Arms that are not installed are skipped, and the
result says so. The other engines need an environment of their own, without torch:

    apt-get install iperf3
    python -m venv peers && peers/bin/pip install --no-deps nixl nixl-cu12 \\
        mooncake-transfer-engine-non-cuda numpy
    python bench/transfer.py --peers peers/bin/python

Rows of RDMA come from bench/rdma_vm.py, which measures in a virtual machine: `--rdma-json` takes
what its `--json` printed, a list of flat objects (alone, or under `rows`), as a table's rows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import facts
from bench.pages import kept
from bench.transfer_arms.base import BLOCK, POOL, Talk

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULT = Path(__file__).parent / "results" / "transfer.md"
SIZES = tuple(1 << shift for shift in range(16, 29, 2))
_AT_ONCE = 256 << 20
"""Largest number of bytes of one arm's transfers of one size in a round."""
_MOST = 32
"""Largest number of transfers of one size in a round."""
_STREAM_SECONDS = 1
_LIMIT = "memcpy piece"
_STEADY = 0.5
"""A limit that falls below this share of its best value measures the machine, not pdserve."""
_SHM, _TCP = "pdserve shm/sample", "pdserve tcp/all"
"""The defaults of a worker; over tcp, `sample` checks everything."""
_FIXED = {"shm": 120, "tcp": 250}
"""Most microseconds of a transfer that do not depend on its size."""
_TRIPS = 1.5
"""Most bare round trips that they may be."""
_BY_HAND = "## Where the time goes"
"""The text from this heading on is written by hand and kept in the result."""
_BUSY = (
    "PROVISIONAL, on a busy machine: processes waited for processors longer than they worked, so "
    "neither figures nor ratios say anything about the back ends."
)

MODULES = {
    "memcpy": ("memcpy", ("piece", "blocks")),
    "bare": ("bare", ("unix", "tcp", "stream")),
    "pdserve": (
        "ours",
        ("shm/off", "shm/sample", "shm/all", "tcp/off", "tcp/sample", "tcp/all"),
    ),
}
ROUND_TRIPS = {"bare unix": "shm", "bare tcp": "tcp"}
"""Rows that move no blocks, and the back end of pdserve that they limit."""
PEERS = {
    "NIXL": ("nixl_arm", {}),
    "NIXL tcp": ("nixl_arm", {"UCX_TLS": "tcp"}),
    "Mooncake tcp": ("mooncake_arm", {}),
}
ABOUT = {
    "memcpy piece": "libc's memcpy of as many bytes in one piece, one thread: shm's limit",
    "memcpy blocks": "the same, block by block",
    "bare": "a message of 64 bytes and its answer between blocking sockets; `stream`: a loop of "
    "sendmsg and one of recvmsg_into over the same blocks, and one byte back",
    "pdserve": "from `deliver` at the source to its `done`, after placing, checking, reporting; "
    "blocks have names, whose headers shm compares",
    "NIXL": "WRITE of prepared descriptors and a notification; UCX chooses among shared memory, "
    "CMA and TCP",
    "NIXL tcp": "the same with UCX_TLS=tcp",
    "Mooncake tcp": "batch_transfer_sync_write over TCP, 1024 blocks a call",
}


@dataclass
class Row:
    """An arm in one mode: seconds by size, one figure per round."""

    name: str
    mode: str
    talk: Talk
    seconds: dict[int, list[float]] = field(default_factory=dict)


# ---------------------------------------------------------------------- measuring


def start(
    name: str, module: str, python: str, environment: dict[str, str], log: IO[bytes], pin: bool
) -> Talk:
    """Starts an arm's two processes and connects them. Raises `RuntimeError`."""
    root = str(Path(__file__).parent.parent)
    command = [python, "-m", f"bench.transfer_arms.{module}", "driver"]
    if pin:
        command += [str(number) for number in sorted(os.sched_getaffinity(0))[:2]]
    os.environ.update(environment | {"PYTHONPATH": root})
    try:
        talk = Talk(command, log)
    finally:
        for key in environment:
            del os.environ[key]
    print(f"{name} starts", file=sys.stderr)
    try:
        talk.ask({"what": "connect"})
    except RuntimeError:
        talk.close()
        raise
    talk.pause()
    return talk


def measure(row: Row, size: int) -> None:
    """Seconds of one transfer of `size` bytes."""
    if row.name in ROUND_TRIPS and size > SIZES[0]:
        return
    count = max(2, min(_MOST, _AT_ONCE // size))
    request = {"what": "measure", "mode": row.mode, "bytes": size, "count": count}
    row.talk.resume()
    seconds = row.talk.ask(request)["seconds"]
    row.talk.pause()
    row.seconds.setdefault(size, []).append(statistics.median(seconds))


def stream(iperf3: str, pin: bool, length: str | None) -> float:
    """GB/s of one stream over the loopback, from one processor to another."""
    command = [iperf3, "-s", "-1", "-p", "5987"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(0.3)
        command = [iperf3, "-c", "127.0.0.1", "-p", "5987", "-t", str(_STREAM_SECONDS), "--json"]
        command += ["-l", length] if length else []
        if pin:
            command += ["-A", ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))]
        out = subprocess.run(command, capture_output=True, timeout=30, check=True).stdout
        rate: float = json.loads(out)["end"]["sum_received"]["bits_per_second"]
        return rate / 8e9
    finally:
        server.kill()
        server.wait()


def compare(
    rows: Sequence[Row], iperf3: str | None, rounds: int, pin: bool
) -> dict[str, list[float]]:
    """Measure all rows, in turns; returns the streams' figures."""
    streams: dict[str, list[float]] = {}
    for number in range(rounds):
        for length in (None, "1M") if iperf3 else ():
            assert iperf3 is not None
            name = f"iperf3{' -l 1M' if length else ''}"
            streams.setdefault(name, []).append(stream(iperf3, pin, length))
        for size in SIZES:
            first = number % len(rows)
            for row in (*rows[first:], *rows[:first]):
                measure(row, size)
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return streams


# ---------------------------------------------------------------------- reporting


def rate_of(row: Row, size: int) -> float:
    """Returns the row's GB/s at this size."""
    return statistics.median(size / seconds / 1e9 for seconds in row.seconds[size])


def fixed_of(row: Row) -> float:
    """Microseconds that do not depend on the size: the smallest transfer's time, less the time of
    its bytes at the largest transfer's rate."""
    small, large = SIZES[0], SIZES[-1]
    pairs = zip(row.seconds[small], row.seconds[large], strict=True)
    return statistics.median(s - small * t / large for s, t in pairs) * 1e6


def share(of: Row, limit: Sequence[float], size: int) -> float:
    """The share of a limit in GB/s that was reached, round by round."""
    pairs = zip(of.seconds[size], limit, strict=True)
    return statistics.median(size / seconds / 1e9 / most for seconds, most in pairs)


def _name(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| GB/s | " + " | ".join(map(_name, SIZES)) + " | fixed, us |",
        "|---|" + "---:|" * (len(SIZES) + 1),
    ]
    for row in rows:
        if row.name in ROUND_TRIPS:
            continue
        cells = [f"{rate_of(row, size):.2f}" for size in SIZES]
        lines.append(f"| {row.name} | " + " | ".join(cells) + f" | {fixed_of(row):.0f} |")
    return lines


def round_trip(row: Row) -> float:
    """Microseconds of a message and its answer."""
    return statistics.median(row.seconds[SIZES[0]]) * 1e6


def fixed(rows: dict[str, Row]) -> list[str]:
    """The table of fixed costs, in bare round trips of the same run."""
    lines = [f"- {name}: a round trip of {round_trip(rows[name]):.0f} us" for name in ROUND_TRIPS]
    lines += [
        "",
        "| fixed cost | us | wanted | bare round trips | wanted | |",
        "|---|" + "---:|" * 4 + "---|",
    ]
    for bare, backend in ROUND_TRIPS.items():
        for mode in ("off", "sample", "all"):
            name = f"pdserve {backend}/{mode}"
            found, most = fixed_of(rows[name]), _FIXED[backend]
            trips = found / round_trip(rows[bare])
            verdict = "met" if found <= most and trips <= _TRIPS else "NOT met"
            lines.append(
                f"| {name} | {found:.0f} | <= {most} | {trips:.2f} | <= {_TRIPS} | {verdict} |"
            )
    return lines


def shares(rows: dict[str, Row], streams: dict[str, list[float]]) -> list[str]:
    """The table of shares of the limits, and of the other engines on the same path."""
    lines = [
        "| ratio | " + " | ".join(map(_name, SIZES)) + " |",
        "|---|" + "---:|" * len(SIZES),
    ]
    pairs: list[tuple[str, str]] = []
    for mode in ("off", "sample", "all"):
        pairs += [(f"pdserve shm/{mode}", other) for other in (_LIMIT, "memcpy blocks", "NIXL")]
        pairs += [
            (f"pdserve tcp/{mode}", other)
            for other in (*streams, "bare stream", "NIXL tcp", "Mooncake tcp")
        ]
    pairs += [(f"pdserve {end}/all", f"pdserve {end}/off") for end in ("shm", "tcp")]
    for name, other in pairs:
        limits = [rates(other, size, rows, streams) for size in SIZES]
        pairs_of = zip(SIZES, limits, strict=True)
        cells = [share(rows[name], limit, size) for size, limit in pairs_of if limit is not None]
        if not cells:
            continue
        lines.append(f"| {name} : {other} | " + " | ".join(f"{c:.2f}" for c in cells) + " |")
    return lines


def aims(rows: dict[str, Row], streams: dict[str, list[float]], *, busy: bool) -> list[str]:
    """Returns each aim at 16 MiB and at the largest size, the measured value, and whether it is
    met. On a busy machine, or where the limit itself is unsteady, an aim is not judged."""
    sizes = (SIZES[-3], SIZES[-1])
    lines = ["| aim | wanted | size | measured | |", "|---|---:|---:|---:|---|"]
    for name, other, bound in _goals(streams):
        for size in sizes:
            head = f"| {name} : {other} | >= {bound} | {_name(size)} |"
            limit = rates(other, size, rows, streams)
            if limit is None:
                lines.append(f"{head} | NOT measured |")
                continue
            found = share(rows[name], limit, size)
            verdict = "met" if found >= bound else "NOT met"
            why = "a busy machine" if busy else off(other, size, rows, streams)
            lines.append(f"{head} {found:.2f} | {f'not judged: {why}' if why else verdict} |")
    return [*lines, "", *_how_to_read(rows, sizes)]


def _goals(streams: dict[str, list[float]]) -> list[tuple[str, str, float]]:
    """Returns (pdserve's arm, the other arm, least ratio), with a worker's default checks, and
    beside the fastest stream."""
    fastest = max(streams, key=lambda name: statistics.median(streams[name]), default="iperf3")
    return [
        (_SHM, _LIMIT, 0.85),
        (_TCP, fastest, 0.85),
        (_SHM, "NIXL", 1.0),
        (_TCP, "NIXL tcp", 1.0),
        ("pdserve shm/all", "pdserve shm/off", 0.7),
        ("pdserve tcp/all", "pdserve tcp/off", 0.7),
        (_TCP, "Mooncake tcp", 1.0),
    ]


def rates(
    other: str, size: int, rows: dict[str, Row], streams: dict[str, list[float]]
) -> list[float] | None:
    """Returns the GB/s of each round; None if it was not measured."""
    if other in streams:
        return streams[other]
    return [size / t / 1e9 for t in rows[other].seconds[size]] if other in rows else None


def off(other: str, size: int, rows: dict[str, Row], streams: dict[str, list[float]]) -> str:
    """Returns why no aim can be judged by this limit. Empty: it can, or it is another engine."""
    if other in streams:
        low, high = min(streams[other]), max(streams[other])
        words = f"{other} itself gave {low:.2f} to {high:.2f} GB/s"
    elif other == _LIMIT:
        low, high = rate_of(rows[other], size), max(rate_of(rows[other], s) for s in SIZES)
        words = f"{other} itself fell to {low:.2f} of {high:.2f} GB/s"
    else:
        return ""
    return words if low < _STEADY * high else ""


def _how_to_read(rows: dict[str, Row], sizes: Sequence[int]) -> list[str]:
    judged = " and ".join(map(_name, sizes))
    lines = [
        f"Aims are judged at {judged} only, and with the checks that a worker has by default "
        "(`--verify-kv sample`, which is all over tcp); rows with other checks are measured, not "
        "judged. Where a limit gave less than half of its best, its aim is not judged.",
    ]
    for ours, other in ((_SHM, "NIXL"), (_TCP, "NIXL tcp"), (_TCP, "Mooncake tcp")):
        if other in rows:
            slower = [s for s in SIZES if share(rows[ours], rates(other, s, rows, {}) or [], s) < 1]
            lines.append(
                f"{other} is faster than {ours} at: {', '.join(map(_name, slower)) or 'none'}."
            )
    return lines


def rdma(file: Path | None) -> list[str]:
    """Returns the section of the measurements in the virtual machine."""
    if file is None:
        return ["NOT measured in this run: rdma (bench/rdma_vm.py)"]
    found = json.loads(file.read_text())
    if not isinstance(found, list):
        found = found["rows"]
    columns = list(dict.fromkeys(key for row in found for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    cells = ([str(row.get(key, "")) for key in columns] for row in found)
    return [*lines, *("| " + " | ".join(each) + " |" for each in cells)]


def report(
    rows: Sequence[Row],
    streams: dict[str, list[float]],
    head: Sequence[str],
    given: argparse.Namespace,
) -> str:
    by_name = {row.name: row for row in rows}
    lines = ["# KV blocks from one process to another", "", *head, "", *table(rows), ""]
    for name, values in streams.items():
        lines.append(
            f"- {name}, one stream of {_STREAM_SECONDS} s: {statistics.median(values):.2f} GB/s "
            f"[{min(values):.2f}, {max(values):.2f}]"
        )
    lines += ["", *fixed(by_name), ""]
    lines += [*aims(by_name, streams, busy=given.busy), "", *shares(by_name, streams), ""]
    lines += ["## RDMA in a virtual machine", "", *rdma(given.rdma_json), ""]
    return "\n".join(lines) + kept(given.out, _BY_HAND)


def versions(peers: str | None) -> str:
    """Versions of the packages."""
    if peers is None:
        return "no peers"
    code = (
        "from importlib.metadata import version as v\n"
        "for p in ('nixl', 'mooncake-transfer-engine-non-cuda'):\n"
        "    try: print(p, v(p))\n"
        "    except Exception: pass"
    )
    out = subprocess.run([peers, "-c", code], capture_output=True, text=True, check=True).stdout
    return ", ".join(out.split("\n")).strip(", ")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", help="a Python with NIXL and Mooncake")
    parser.add_argument("--iperf3", default=shutil.which("iperf3"), help="apt-get install iperf3")
    parser.add_argument("--rdma-json", type=Path, help="what bench/rdma_vm.py --json printed")
    parser.add_argument("--no-pin", action="store_true", help="leave processors to the system")
    parser.add_argument("--busy", action="store_true", help="others work here: judge nothing")
    parser.add_argument("--note", default="", help="a sentence for the result file")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="what the arms print")
    given = parser.parse_args()
    pin = len(os.sched_getaffinity(0)) > 1 and not given.no_pin
    text = measured(given, pin)
    given.out.write_text(text)
    print(text)


def measured(given: argparse.Namespace, pin: bool) -> str:
    """Measures; returns the report."""
    wanted: list[tuple[str, str, str | None, dict[str, str]]]
    wanted = [(name, module, sys.executable, {}) for name, (module, _) in MODULES.items()]
    wanted += [(name, module, given.peers, env) for name, (module, env) in PEERS.items()]
    rows: list[Row] = []
    talks: list[Talk] = []
    skipped = [] if given.iperf3 else ["iperf3: apt-get install iperf3"]
    with given.log.open("wb") as log:
        try:
            for name, module, python, environment in wanted:
                if not python:
                    skipped.append(f"{name}: no --peers")
                    continue
                try:
                    talks.append(start(name, module, python, environment, log, pin))
                except RuntimeError as error:
                    skipped.append(f"{name}: {error}")
                    continue
                modes = MODULES[name][1] if name in MODULES else ("",)
                rows += [Row(f"{name} {mode}".strip(), mode, talks[-1]) for mode in modes]
            streams = compare(rows, given.iperf3, given.rounds, pin)
        finally:
            for talk in talks:
                talk.resume()
                talk.close()
    return report(rows, streams, _head(given, pin, skipped), given)


def _head(given: argparse.Namespace, pin: bool, skipped: Sequence[str]) -> list[str]:
    about = [
        f"Blocks of {BLOCK >> 10} KiB between two processes on one machine, "
        f"{'on a processor of their own each' if pin else 'not pinned'}; pools of {POOL >> 20} MiB "
        f"at each end,",
        f"blocks in random order; rounds: {given.rounds}, in which all arms took turns. "
        "Repeat with `python bench/transfer.py`.",
        *filter(None, (given.note, _BUSY if given.busy else "")),
        "",
    ]
    load = f"Load average at the end: {os.getloadavg()[0]:.1f}, the arms' own included"
    about += [f"- {fact}" for fact in (*facts(), versions(given.peers), load)]
    about += [f"- {name}: {text}" for name, text in ABOUT.items()]
    return about + [f"- NOT measured: {reason}" for reason in skipped]


if __name__ == "__main__":
    main()
