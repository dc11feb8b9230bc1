"""Measures the cost of a bus between two processes: pdserve's links, a bare loop and other buses.

    python bench/bus.py [--rounds N] [--seconds S] [--arms bare,pdserve,...] [--no-pin]

Every arm has a server process of its own; this process asks. All arms take turns in the same
rounds, each round beginning with another one, so that what the machine does besides falls on all of
them. Figures are medians over rounds, with the range in brackets; ratios are medians of the ratios
within a round. Messages carry 128 bytes. One-way messages are numbered and must arrive complete and
in order, or the run fails. Takes two minutes and writes bench/results/bus.md.

The first arms need nothing but pdserve. What is not installed is skipped, and the result says so.
To have all of them, keep the packages apart from pdserve's own:

    apt-get install nats-server
    python -m venv peers && peers/bin/pip install nats-py pyzmq grpcio
    PYTHONPATH=$(echo peers/lib/python3*/site-packages) python bench/bus.py
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent))

import uvloop

from bench.bus_arms.bare import Bare
from bench.bus_arms.base import PAYLOAD_BYTES, Arm
from bench.bus_arms.grpc_arm import Grpc
from bench.bus_arms.nats_arm import Nats
from bench.bus_arms.ours import Ours
from bench.bus_arms.zmq_arm import Zmq
from bench.machine import facts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

ARMS: dict[str, type[Arm]] = {arm.name: arm for arm in (Bare, Ours, Nats, Zmq, Grpc)}
RESULT = Path(__file__).parent / "results" / "bus.md"
CALLERS = 64
SERIAL_CALLS = 4000
WARM_UP = 300
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass
class Running:
    """An arm with its server process."""

    arm: Arm
    server: subprocess.Popen[bytes]
    figures: dict[str, list[float]] = field(default_factory=dict)
    """Figures by name, one per round."""

    def add(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)


# ---------------------------------------------------------------------- measuring


async def measure_latency(running: Running) -> None:
    """Microseconds of one call at a time."""
    payload = os.urandom(PAYLOAD_BYTES)
    times = []
    for _ in range(SERIAL_CALLS):
        started = time.perf_counter()
        await running.arm.call(payload)
        times.append(time.perf_counter() - started)
    times.sort()
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        running.add(name, times[int(share * len(times))] * 1e6)


async def measure_calls(running: Running, seconds: float) -> None:
    """Calls per second of `CALLERS` callers, and the CPU they cost on both sides."""
    payload = os.urandom(PAYLOAD_BYTES)
    stop = time.perf_counter() + seconds
    done = 0

    async def caller() -> None:
        nonlocal done
        while time.perf_counter() < stop:
            await running.arm.call(payload)
            done += 1

    ours, theirs = time.process_time(), _cpu_seconds(running.server.pid)
    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    running.add("calls", done / (time.perf_counter() - started))
    running.add("client cpu", (time.process_time() - ours) / done * 1e6)
    running.add("server cpu", (_cpu_seconds(running.server.pid) - theirs) / done * 1e6)


async def measure_publish(running: Running, seconds: float) -> None:
    """One-way messages per second, all of which arrived in order."""
    payload = os.urandom(PAYLOAD_BYTES)
    rate = running.figures.get("published", [100_000.0])[-1]
    count = max(10_000, int(rate * seconds))
    started = time.perf_counter()
    arrived = await running.arm.publish(count, payload)
    elapsed = time.perf_counter() - started
    if arrived != count:
        raise RuntimeError(f"{running.arm.name}: {arrived} of {count} messages arrived in order")
    running.add("published", count / elapsed)


async def warm_up(running: Running) -> None:
    """Makes some calls and checks their answers."""
    for _ in range(WARM_UP):
        payload = os.urandom(PAYLOAD_BYTES)
        if running.arm.payload_of(await running.arm.call(payload)) != payload:
            raise RuntimeError(f"{running.arm.name}: a wrong answer")


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process, and of its broker if it started one."""
    pids = [pid]
    children = Path(f"/proc/{pid}/task/{pid}/children")
    if children.exists():
        pids += map(int, children.read_text().split())
    total = 0.0
    for each in pids:
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
    return total


def _busy_seconds() -> float:
    """CPU time that the whole machine has spent, or that a hypervisor has taken from it."""
    user, nice, system, _, _, *others = Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    return sum(map(int, (user, nice, system, *others))) / _TICKS_PER_SECOND


# ---------------------------------------------------------------------- running


def start(arm: type[Arm], processor: int | None) -> tuple[Running, int]:
    """Starts a server process on its own processor; returns it with its port when it listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, __file__, "--serve", arm.name, "--port", str(port)]
    if processor is not None:
        command += ["--processor", str(processor)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout is not None
    if server.stdout.readline().strip() != b"ready":
        raise RuntimeError(f"{arm.name}: the server did not start")
    return Running(arm(), server), port


async def serve(name: str, port: int) -> None:
    """Serves until the parent process closes this process's input or ends."""
    arm = ARMS[name]()
    await arm.serve(port)
    print("ready", flush=True)
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), over.set)
    await over.wait()
    await arm.stop()
    os._exit(0)  # its connections need no orderly end


async def stop(running: Running) -> None:
    await running.arm.close()
    assert running.server.stdin is not None
    running.server.stdin.close()
    running.server.wait(timeout=30)


async def compare(
    names: Sequence[str], rounds: int, seconds: float, processor: int | None
) -> tuple[list[Running], float]:
    """Measures all arms in turns; also returns the number of processors that other work used
    meanwhile."""
    async with AsyncExitStack() as stack:
        found = []
        for name in names:
            running, port = start(ARMS[name], processor)
            await running.arm.connect(port)
            stack.push_async_callback(stop, running)
            found.append(running)
        for running in found:
            await warm_up(running)
        measurements: list[Callable[[Running], Awaitable[None]]] = [
            measure_latency,
            lambda running: measure_calls(running, seconds),
            lambda running: measure_publish(running, seconds),
        ]
        started, others = time.perf_counter(), _foreign_seconds(found)
        for number in range(rounds):
            for measure in measurements:
                first = number % len(found)
                for running in found[first:] + found[:first]:
                    await measure(running)
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
        others = (_foreign_seconds(found) - others) / (time.perf_counter() - started)
    return found, others


def _foreign_seconds(found: Sequence[Running]) -> float:
    ours = time.process_time() + sum(_cpu_seconds(running.server.pid) for running in found)
    return _busy_seconds() - ours


# ---------------------------------------------------------------------- reporting

COLUMNS = {
    "p50": ("p50, one at a time", "us", "{:.1f}"),
    "p99": ("p99, one at a time", "us", "{:.1f}"),
    "calls": (f"calls, {CALLERS} at a time", "/s", "{:,.0f}"),
    "client cpu": ("CPU per call, client", "us", "{:.2f}"),
    "server cpu": ("CPU per call, server", "us", "{:.2f}"),
    "published": ("one way", "/s", "{:,.0f}"),
}


def ratio(of: Running, to: Running, name: str) -> float:
    """The median of the ratios within each round."""
    pairs = zip(of.figures[name], to.figures[name], strict=True)
    return statistics.median(a / b for a, b in pairs)


def rows(found: Sequence[Running]) -> list[str]:
    lines = ["| what | " + " | ".join(running.arm.name for running in found) + " |"]
    lines.append("|---|" + "---:|" * len(found))
    for name, (title, unit, form) in COLUMNS.items():
        cells = []
        for running in found:
            values = running.figures.get(name)
            if values is None:
                cells.append("")
                continue
            low, high = form.format(min(values)), form.format(max(values))
            cells.append(f"{form.format(statistics.median(values))} [{low}, {high}]")
        lines.append(f"| {title}, {unit} | " + " | ".join(cells) + " |")
    return lines


def aims(by_name: dict[str, Running]) -> list[str]:
    """Returns each aim, the measured value, and whether the aim is met."""
    ours = by_name["pdserve"]
    wanted = [
        ("calls at 64, of the bare loop's", "calls", "bare", 0.75, True),
        ("p50 at one, of the bare loop's", "p50", "bare", 1.5, False),
        ("p99 at one, of the bare loop's", "p99", "bare", 1.5, False),
        ("one way, of the bare loop's", "published", "bare", 0.70, True),
        ("calls at 64, times nats-py's", "calls", "nats-py", 3.0, True),
        ("one way, times nats-py's", "published", "nats-py", 3.0, True),
    ]
    lines = ["| aim | wanted | measured | |", "|---|---:|---:|---|"]
    for title, name, other, bound, least in wanted:
        sign = ">=" if least else "<="
        if other not in by_name:
            lines.append(f"| {title} | {sign} {bound} | | NOT measured |")
            continue
        measured = ratio(ours, by_name[other], name)
        met = measured >= bound if least else measured <= bound
        lines.append(
            f"| {title} | {sign} {bound} | {measured:.2f} | {'met' if met else 'NOT met'} |"
        )
    return lines


def report(
    found: Sequence[Running], skipped: Sequence[str], about: str, machine: Sequence[str]
) -> str:
    lines = ["# A bus between two processes", "", about, ""]
    lines += [f"- {fact}" for fact in machine]
    lines += [f"- {running.arm.name}: {running.arm.about}" for running in found]
    lines += [f"- NOT measured: {reason}" for reason in skipped]
    lines += ["", *rows(found), ""]
    by_name = {running.arm.name: running for running in found}
    if {"bare", "pdserve"} <= by_name.keys():
        lines += [*aims(by_name), ""]
    return "\n".join(lines)


def versions() -> str:
    """Versions of the packages and of the broker."""
    packages = ("uvloop", "msgspec", "msgpack", "nats-py", "pyzmq", "grpcio")
    found = [*filter(None, map(_version, packages))]
    if broker := shutil.which("nats-server"):
        out = subprocess.run([broker, "--version"], capture_output=True, text=True, check=False)
        found.append(out.stdout.strip().replace(": v", " "))
    return ", ".join(found)


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement of a rate")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--no-pin", action="store_true", help="leave processors to the system")
    parser.add_argument("--note", default="", help="a sentence for the result file")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--processor", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        if given.processor is not None:
            os.sched_setaffinity(0, {given.processor})
        uvloop.run(serve(given.serve, given.port))
        return
    names, skipped = [], []
    for name in given.arms.split(","):
        reason = ARMS[name].missing()
        if reason is None:
            names.append(name)
        else:
            print(f"{name} is SKIPPED: {reason}; see --help", file=sys.stderr)
            skipped.append(f"{name}, because {reason}")
    machine = [*facts(), versions()]  # before this process is confined to a part of it
    usable = sorted(os.sched_getaffinity(0))
    pin = len(usable) > 1 and not given.no_pin
    if pin:
        os.sched_setaffinity(0, {usable[0]})
    servers = usable[1] if pin else None
    found, others = uvloop.run(compare(names, given.rounds, given.seconds, servers))
    machine.append(f"Others used {others:.2f} of the processors meanwhile")
    pinned = "pinned to one processor each" if pin else "not pinned"
    about = (
        f"Client and server are two processes over loopback TCP, {pinned}; a broker shares its\n"
        f"server's processor. {PAYLOAD_BYTES} bytes per message; medians of {given.rounds} rounds "
        f"in which all arms took turns,\nand ranges; ratios are medians of those within a round. "
        f"Repeat with `python bench/bus.py`.\n{given.note}".strip()
    )
    text = report(found, skipped, about, machine)
    given.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
