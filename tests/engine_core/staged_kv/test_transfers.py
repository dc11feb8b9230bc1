"""Staging blocks in device memory, moved by cuda_ipc or staged by tcp: two engines in one process.

Without a GPU over fake drivers, one for each end, whose copies come as late as they may. With one,
over its memory.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.messages.engine import AbortAttempt, TransferSpec
from pdserve.transfer.backends import TransferBackend, make_backends
from pdserve.transfer.cuda import nvidia
from pdserve.transfer.same_host.cuda_ipc import CudaIpcTransport
from pdserve.transfer.tcp.transport import TcpTransport
from tests.engine_core.kv_transfer.test_handoff import prompt_of, request
from tests.support.fake_cuda import FakeCuda
from tests.support.staged_engine import reference
from tests.support.staged_pair import SPEC, TransportPair, make_transport_pair

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.transfer.cuda.driver import CudaDriver

LENGTH = 18


def cuda_ipc(driver: CudaDriver) -> TransferBackend:
    return TransferBackend(
        name="cuda_ipc",
        make=lambda key, regions, ask: CudaIpcTransport(
            *key, regions, ask, verify="all", driver=driver
        ),
        places=lambda: ("here",),
    )


def tcp(driver: CudaDriver | None) -> TransferBackend:
    return TransferBackend(
        name="tcp",
        make=lambda key, regions, ask: TcpTransport(
            *key, regions, ask, host="127.0.0.1", driver=driver
        ),
    )


ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        nvidia.unavailable_reason() is not None, reason=str(nvidia.unavailable_reason())
    ),
]


@pytest.fixture(params=["fake", pytest.param("nvidia", marks=ON_GPU)])
def device(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture(params=[cuda_ipc, tcp])
def both(request: pytest.FixtureRequest, device: str, seed: int) -> Iterator[TransportPair]:
    """P and D, which are closed in the end and leave nothing."""
    drivers: list[CudaDriver]
    if device == "fake":
        drivers = [FakeCuda(Random(seed + n), name) for n, name in enumerate((b"p", b"d"))]
    else:
        drivers = [nvidia.NvidiaDriver()] * 2
    made = make_transport_pair([request.param(driver) for driver in drivers], drivers)
    yield made
    made.close()
    for driver in drivers:
        if isinstance(driver, FakeCuda):
            assert not driver.broken
            assert driver.mapped == 0, "memory that was opened or allocated is left"


def test_kv_goes_from_device_to_device(both: TransportPair) -> None:
    wanted = [request(prompt_of(length, seed=length)) for length in (1, 4, 18, 33)]
    ledgers = [both.submit(one)[1] for one in wanted]
    both.until(lambda: all(ledger.done for ledger in ledgers))
    assert [ledger.tokens for ledger in ledgers] == [[reference(one)] for one in wanted]
    assert both.d.core.computed_tokens == sum(len(reference(one)) for one in wanted)
    assert both.d.stats.received_tokens == sum(len(one.prompt) for one in wanted)
    both.until(lambda: len(both.sent) == len(wanted))
    assert [one.kind for one in both.sent] == [""] * len(wanted)
    assert both.p.stats.sent_bytes == both.d.stats.received_bytes > 0
    for end in (both.p, both.d):
        (path,) = end.mover.paths()
        staged = "KV in GPU memory is copied through host memory" in path.degraded
        assert staged == (path.backend == "tcp"), path


def test_blocks_come_back_after_an_attempt_that_was_given_up(both: TransportPair) -> None:
    handle, ledger = both.submit(request(prompt_of(LENGTH)))
    both.until(lambda: handle in both.opened)
    both.d.core.handle(AbortAttempt(handle, 1))
    both.until(lambda: both.d.core.staging.blocks.counts().used == 0)
    both.until(lambda: both.d.core.staging.blocks.counts().quarantined == 0)
    both.open(handle)
    both.until(lambda: ledger.done)
    assert ledger.tokens == [reference(ledger.request)]


@pytest.mark.parametrize("places", [("device", "device"), ("device", "host"), ("host", "device")])
def test_workers_of_one_host_say_that_and_why_shared_memory_does_not_join_them(
    places: tuple[str, str], seed: int
) -> None:
    """`cuda_ipc` joins none of these pools, `shm` moves host memory only, `tcp` stages."""
    fakes = [FakeCuda(Random(seed + n), name) for n, name in enumerate((b"p", b"d"))]
    drivers = [
        fake if place == "device" else None for fake, place in zip(fakes, places, strict=True)
    ]
    better = make_backends(TransferSpec(backends=("cuda_ipc", "shm")))
    # An engine computes no checksums of device memory: a peer must not demand them.
    spec = msgspec.structs.replace(SPEC, transfer=TransferSpec(verify="sample"))
    pair = make_transport_pair([[*better, tcp(each)] for each in drivers], drivers, spec)
    try:
        ledger = pair.submit(request(prompt_of(LENGTH)))[1]
        pair.until(lambda: ledger.done and len(pair.sent) == 1)
        assert ledger.tokens == [reference(ledger.request)]
        assert pair.d.stats.received_tokens == LENGTH
        for end, place in zip((pair.p, pair.d), places, strict=True):
            (path,) = end.mover.paths()
            assert path.backend == "tcp"
            assert bool(path.degraded) == (place == "device"), path
            if place == "device":
                assert "KV in GPU memory is copied through host memory" in path.degraded
                assert "shm: the pool is in device memory" in path.degraded, path.degraded
    finally:
        pair.close()
    assert [fake.mapped for fake in fakes] == [0, 0]
