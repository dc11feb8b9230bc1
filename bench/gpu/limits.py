"""Measures the limits of a device: bytes per second of a copy, operations per second of a product.

    python bench/gpu/limits.py [--device cuda] [--dry]

A copy counts what it reads and what it writes. Both are medians of many repetitions, each waited
for; of several sizes the best counts, since small ones cannot fill the device. Needs torch alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

COPIES = (64 << 20, 256 << 20, 1 << 30)
"""Sizes of the copies in bytes."""
PRODUCTS = (2048, 4096, 8192, 16384)
"""Rows and columns of both factors."""
DRY_COPIES, DRY_PRODUCTS = (1 << 20,), (64, 128)
SECONDS_EACH = 3.0
"""Longest time for the measurement of one quantity."""


class Budget:
    """The time that is left for all measurements."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds
        self.left_out: list[str] = []
        """Names of the measurements that were left out, with the reasons."""

    @property
    def left(self) -> float:
        """Seconds that are left; negative when the time is over."""
        return self._end - time.perf_counter()

    def allows(self, what: str, seconds: float = 0.0) -> bool:
        """Returns True if there is time for `what`, which may take `seconds`. Otherwise notes it as
        left out."""
        if self.left > seconds:
            return True
        self.left_out.append(f"{what}: no time was left")
        return False


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one device."""

    bandwidth: float
    """Bytes per second, read and written."""
    matmul: float
    """Operations per second in bfloat16; a multiplication and an addition are two."""
    copies: dict[int, float]
    """Bytes per second by bytes copied."""
    products: dict[int, float]
    """Operations per second by rows."""


def timed(
    work: Callable[[], object],
    device: torch.device,
    *,
    warm: int = 3,
    least: int = 5,
    most: int = 50,
    seconds: float = SECONDS_EACH,
) -> list[float]:
    """Measures the times of `work`, each from an idle device to an idle device."""
    for _ in range(warm):
        work()
    settle(device)
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < least or (len(found) < most and time.perf_counter() < end):
        begin = time.perf_counter()
        work()
        settle(device)
        found.append(time.perf_counter() - begin)
    return found


def settle(device: torch.device) -> None:
    """Waits until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yields a function that returns the bytes of the device that the block held at most, beside
    those allocated before it. Other devices than CUDA's are not looked at."""
    if device.type != "cuda":
        yield lambda: 0
        return
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield lambda: torch.cuda.max_memory_allocated(device) - before


def measure(device: torch.device, budget: Budget, *, dry: bool = False) -> Limits:
    """Measures copies and products, at least one size of each even if no time is left."""
    copies: dict[int, float] = {}
    for size in DRY_COPIES if dry else COPIES:
        if not copies or budget.allows(f"copying {size >> 20} MiB", SECONDS_EACH):
            copies[size] = 2 * size / _copy(size, device)
    products: dict[int, float] = {}
    for rows in DRY_PRODUCTS if dry else PRODUCTS:
        if not products or budget.allows(f"a product of {rows} rows", SECONDS_EACH):
            products[rows] = 2 * rows**3 / _product(rows, device)
    return Limits(max(copies.values()), max(products.values()), copies, products)


def _copy(size: int, device: torch.device) -> float:
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return statistics.median(timed(lambda: target.copy_(source), device))


def _product(rows: int, device: torch.device) -> float:
    left, right = (torch.randn(rows, rows, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    return statistics.median(timed(lambda: torch.matmul(left, right, out=out), device))


def machine(device: torch.device) -> dict[str, str]:
    """Describes the device and the software of a measurement."""
    found = {"torch": torch.__version__, "device": str(device)}
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        found |= {
            "name": facts.name,
            "memory": f"{facts.total_memory / 2**30:.1f} GiB",
            "capability": f"{facts.major}.{facts.minor}",
            "multiprocessors": str(facts.multi_processor_count),
            "cuda": str(torch.version.cuda),
        }
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, to see that it works")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    found = measure(device, Budget(120), dry=options.dry)
    print(json.dumps({"machine": machine(device), "limits": asdict(found)}, indent=2))


if __name__ == "__main__":
    main()
