"""The ring of staging buffers, on a device that copies late; and how runs are cut."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from pdserve.testing.kv_oracle import layouts
from pdserve.transfer.base import Region
from pdserve.transfer.cuda import host_staging
from pdserve.transfer.cuda.driver import CudaError
from pdserve.transfer.cuda.host_staging import StagingRing, unsupported_reason
from tests.support.fake_cuda import FakeCuda

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.transfer.cuda.host_staging import PoolRuns

SIZE = 4000


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[FakeCuda]:
    monkeypatch.setattr(host_staging, "BUFFER", 64)
    device = FakeCuda(Random(seed), hidden=True)
    yield device
    assert device.mapped == device.queued == 0


@pytest.fixture
def pools(device: FakeCuda, seed: int) -> Iterator[list[int]]:
    """Two pools, filled at random."""
    addresses = [device.allocate(SIZE) for _ in range(2)]
    for number, address in enumerate(addresses):
        device.write(address, Random(seed + number).randbytes(SIZE))
    yield addresses
    for address in addresses:
        device.free(address)


def some_runs(random: Random) -> list[PoolRuns]:
    """Runs of both pools that do not overlap, some longer than a buffer, some empty."""
    places = {pool: 0 for pool in range(2)}
    runs: list[PoolRuns] = []
    for _ in range(12):
        pool, offsets, lengths = random.randrange(2), [], []
        for _ in range(random.choice((0, 1, 7))):
            length = random.choice((0, 1, 5, 64, 150))
            offsets.append(places[pool] + random.randrange(3))
            lengths.append(length)
            places[pool] = offsets[-1] + length
        runs.append((pool, offsets, lengths))
    return runs


def content(device: FakeCuda, pools: list[int], runs: list[PoolRuns]) -> bytes:
    return b"".join(
        device.read(pools[pool] + at, length)
        for pool, offsets, lengths in runs
        for at, length in zip(offsets, lengths, strict=True)
    )


def test_what_is_loaded_and_stored_again_is_the_same(device, pools, seed: int) -> None:
    random = Random(seed)
    out, back = StagingRing(device, pools), StagingRing(device, pools)
    for _ in range(20):
        runs = some_runs(random)
        wanted = content(device, pools, runs)
        loaded = [bytes(view) for view in out.load(runs)]
        assert b"".join(loaded) == wanted
        assert all(len(piece) == 64 for piece in loaded[:-1])
        payload = random.randbytes(len(wanted))
        at = 0
        for view in back.store(runs, lambda: True):
            view[:] = payload[at : at + len(view)]
            at += len(view)
        back.drain()
        assert content(device, pools, runs) == payload
    out.close()
    back.close()
    back.close()


def test_a_ring_that_has_ended_says_why(device, pools) -> None:
    ring = StagingRing(device, pools)
    assert [len(view) for view in ring.load([(0, [0], [100])])] == [64, 36]
    device.breaks_after = device.copied
    with pytest.raises(CudaError, match="told to break"):
        list(ring.load([(0, [0], [100])]))
    with pytest.raises(CudaError, match="told to break"):
        list(ring.store([(0, [0], [1])], lambda: True))
    ring.drain()
    with pytest.raises(CudaError, match="told to break"):
        ring.check()
    ring.close()


def test_loading_that_is_given_up_leaves_nothing_under_way_after_a_drain(device, pools) -> None:
    ring = StagingRing(device, pools)
    device.hold()
    loading = ring.load([(1, [0], [1000])])
    device.go_on()
    next(loading)
    del loading
    ring.drain()
    assert device.queued == 0
    assert b"".join(map(bytes, ring.load([(0, [7], [300])]))) == device.read(pools[0] + 7, 300)
    ring.close()


@pytest.mark.parametrize("failing", [None, 0, 2, 5])
def test_it_is_tried_before_it_is_offered(device, failing: int | None) -> None:
    (layout,) = layouts(4, 1)
    address = device.allocate(SIZE)
    device.fails_at = failing
    why = unsupported_reason([Region(layout, 4, address=address)], device)
    assert ("CUDA_ERROR_UNKNOWN" in why) == (failing is not None)
    device.free(address)
