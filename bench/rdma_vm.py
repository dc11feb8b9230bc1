"""The rdma back end against perftest's ib_write_bw on the same two adapters.

    rdma-vm run --python .venv/bin/python -- python bench/rdma_vm.py [--json] [--mebibytes 16]

A size is that of a run: blocks of one run, scattered at the destination so that none merge. Both
move as many bytes from one adapter to the other, in turns; the result has the medians. A transfer
of pdserve is complete: grant, plan, writes, the notification, and its arrival at the sink. This
back end has no checksums (`pdserve/transfer/rdma`): the figures are those of unverified transfers.

In a virtual machine with software adapters the processor is the limit: the figures compare two ways
of posting and say nothing about adapters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from bench.machine import facts
from pdserve.testing.kv_oracle import layouts
from pdserve.testing.transfer_support import RecordingTransferSink, deliver, order, transfer_pair
from pdserve.transfer.base import KvPart
from pdserve.transfer.rdma.adapter import QueuePairOptions
from pdserve.transfer.rdma.pyverbs_loader import unavailable_reason
from pdserve.transfer.rdma.transport import RdmaTransport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import NodeLife
    from pdserve.transfer.base import CallPeer, KvPath, KvTransport, Region

SIZES = (64 << 10, 256 << 10, 1 << 20)
TOKENS = 16
PATIENT = QueuePairOptions(timeout=17)


def devices() -> tuple[str, str]:
    """The source's and the destination's adapter."""
    names = os.environ.get("RDMA_VM_DEVICES", "").split()
    if not names:
        sys.exit("RDMA_VM_DEVICES names no adapters")
    return names[0], names[-1]


# ------------------------------------------------------------------------------ ours


def make(key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
    device = devices()[0 if key.node == "p" else 1]
    return RdmaTransport(key.node, key.epoch, regions, ask, devices=[device], options=PATIENT)


async def ours(size: int, total: int, rounds: int, theirs: list[float]) -> list[float]:
    """GB/s of each round; perftest runs between the rounds."""
    (layout,) = layouts(2, 1, layers=1, tokens=TOKENS, dim=size // (2 * 2 * TOKENS * 2))
    count = total // size
    rates = []
    async with transfer_pair(make, (layout,), (layout,), blocks=count) as world:
        source, destination = await world.connect()
        for round in range(rounds + 1):
            rate = await transfer(source, destination, count, size)
            if round:  # the first one warms both up
                rates.append(rate)
                theirs.append(await asyncio.to_thread(perftest, size, count))
        assert source.stats.runs_delivered == (rounds + 1) * count
        await source.close("the end")
    return rates


async def transfer(source: KvPath, destination: KvPath, count: int, size: int) -> float:
    """Makes one transfer of all blocks."""
    there = random.Random(count).sample(range(count), count)
    there.sort(key=lambda block: (block % 2, block))  # so that no two neighbours stay together
    sink = RecordingTransferSink()
    begun = time.perf_counter()
    grant = destination.grant(order(there, count * TOKENS), sink)
    waiter = deliver(source, grant.ticket, KvPart(0, 0, range(count), (0, 1)))
    assert await waiter.wait() is None
    await sink.until(lambda s: s.parts == [0])
    grant.finish()
    return count * size / (time.perf_counter() - begun) / 1e9


# ------------------------------------------------------------------------------ perftest's


def perftest(size: int, count: int) -> float:
    """GB/s of ib_write_bw with as many writes."""
    source, destination = devices()
    address = os.environ.get("RDMA_VM_ADDRESSES", "").split()[-1]
    index = os.environ.get("RDMA_VM_GID_INDEX", "1")
    common = ["-s", str(size), "-n", str(max(5, count)), "-x", index, "-F"]
    server = subprocess.Popen(
        ["ib_write_bw", "-d", destination, *common],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(50):
            time.sleep(0.2)
            done = subprocess.run(
                ["ib_write_bw", "-d", source, *common, address],
                capture_output=True,
                text=True,
                timeout=120,
            )
            if done.returncode == 0:
                return average(done.stdout, size)
        raise RuntimeError(f"ib_write_bw: {done.stderr or done.stdout}")
    finally:
        server.kill()
        server.wait()


def average(output: str, size: int) -> float:
    """Reads ib_write_bw's table: bytes, iterations, peak, average; in MiB/s."""
    for line in output.splitlines():
        columns = line.split()
        if len(columns) >= 5 and columns[0] == str(size):
            return float(columns[3]) * 2**20 / 1e9
    raise RuntimeError(f"ib_write_bw said something else:\n{output}")


# ------------------------------------------------------------------------------ the result


def measure(total: int, rounds: int) -> list[dict[str, Any]]:
    """The rows, one per size."""
    rows = []
    for size in SIZES:
        theirs: list[float] = []
        rates = asyncio.run(ours(size, total, rounds, theirs))
        mine, its = statistics.median(rates), statistics.median(theirs)
        row = {"run_bytes": size, "pdserve": mine, "ib_write_bw": its, "share": mine / its}
        rows.append({**row, "rounds": rounds, "bytes": total, "verify": "off"})
    return rows


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="The rdma back end against ib_write_bw.")
    parser.add_argument("--json", action="store_true", help="rows as JSON, in GB/s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mebibytes", type=int, default=16, help="per round")
    options = parser.parse_args()
    reason = unavailable_reason()
    if reason is not None:
        sys.exit(reason)
    rows = measure(options.mebibytes << 20, options.rounds)
    if options.json:
        print(json.dumps({"machine": facts(), "rows": rows}))
        return
    print("| run | pdserve GB/s | ib_write_bw GB/s | share |\n|---:|---:|---:|---:|")
    for row in rows:
        size = f"{row['run_bytes'] >> 10} KiB"
        rates = f"{row['pdserve']:.4f} | {row['ib_write_bw']:.4f}"
        print(f"| {size} | {rates} | {row['share']:.0%} |")


if __name__ == "__main__":
    main()
