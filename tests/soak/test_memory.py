"""What counts as a leak, and what as noise."""

from __future__ import annotations

import random

from tests.soak.memory import Line, Sample, anonymous_bytes, leaks

MIB = 1 << 20


def line(sizes) -> Line:
    samples = [Sample(number * 1000, int(size), 0, 0, 0) for number, size in enumerate(sizes)]
    return Line("a", samples)


def test_a_slope_is_what_each_piece_of_work_leaves_behind():
    assert line(100 * MIB + 48 * 1000 * n for n in range(40)).slope == 48.0
    assert line([100 * MIB] * 40).slope == 0.0


def test_what_fills_up_at_first_is_no_slope():
    assert line(min(n, 10) * MIB for n in range(40)).slope == 0.0


def test_noise_of_an_allocator_is_no_leak_and_an_object_each_is_one():
    draw = random.Random(7)
    noise = [draw.randrange(MIB) for _ in range(40)]
    flat, leaking = line(noise), line(n * 1000 * 64 + size for n, size in enumerate(noise))
    assert not leaks([flat], per_piece=16, noise=MIB)
    assert leaks([leaking], per_piece=16, noise=MIB)


def test_memory_of_files_is_not_counted_and_swap_is():
    page = "Rss:   5000 kB\nPss:  900 kB\nAnonymous:   1024 kB\nAnonHugePages:  0 kB\nSwap:  2 kB\n"
    assert anonymous_bytes(page + "SwapPss:  2 kB\n") == 1026 * 1024
