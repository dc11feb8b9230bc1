"""KV between two processes of one GPU, over `cuda_ipc`, beside a copy within the device.

    python bench/gpu/handoff.py --out DIR             # gpu_handoff.json
    python bench/gpu/handoff.py --dry                 # few bytes over shared memory, without a GPU

The processes have pools with blocks of an 8B model. A time is that from the order to deliver until
the destination has placed, checked and reported. After each size the last block has to be at the
other end. A copy reads and writes each byte once, and so does a delivery. The exit status is 1 if
something failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from bench.gpu import limits
from bench.machine import facts
from bench.transfer_arms.base import Talk

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZES = (4 << 20, 64 << 20, 256 << 20, 1 << 30)
"""Bytes of a transfer: 32 to 8,192 tokens."""
COUNT = 10
MODES = ("cuda_ipc/off", "cuda_ipc/sample")
DRY_SIZES, DRY_COUNT = (1 << 20,), 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, writes. Returns the exit status."""
    options = _arguments(arguments)
    device = torch.device("cpu" if options.dry else "cuda")
    arm, modes = ("ours", ("shm/off",)) if options.dry else ("device", MODES)
    bandwidth = limits.measure(device, limits.Budget(20), dry=options.dry).bandwidth
    report: dict[str, Any] = {"machine": limits.machine(device), "facts": list(facts())}
    report |= {"copy": bandwidth, "rows": [], "failure": ""}
    talk = Talk([sys.executable, "-m", f"bench.transfer_arms.{arm}", "driver"])
    try:
        talk.ask({"what": "connect"})
        for mode in modes:
            for size in DRY_SIZES if options.dry else SIZES:
                seconds = _seconds(talk, mode, size, DRY_COUNT if options.dry else COUNT)
                used = 2 * size / seconds / bandwidth
                report["rows"].append(
                    {"mode": mode, "bytes": size, "seconds": seconds, "used": used}
                )
                print(f"{mode}, {size >> 20} MiB: {seconds * 1e3:.2f} ms, {used:.1%} of a copy")
    except RuntimeError as error:
        report["failure"] = str(error)
        print("FAILED", error)
    finally:
        talk.close()
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "gpu_handoff.json").write_text(json.dumps(report, indent=2) + "\n")
    return 1 if report["failure"] else 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for gpu_handoff.json")
    parser.add_argument("--dry", action="store_true", help="shared memory instead of a GPU")
    return parser.parse_args(arguments)


def _seconds(talk: Talk, mode: str, size: int, count: int) -> float:
    """The median of `count` transfers. Raises `RuntimeError`."""
    wanted = {"what": "measure", "mode": mode, "bytes": size, "count": count}
    seconds: list[float] = talk.ask(wanted)["seconds"]
    return statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
