"""Which back end joins a pair: the best that both have in one place, no other in silence."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ConfigError, TransferError, TransferRefused
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.engine import TransferSpec
from pdserve.messages.transfer import BackendOffers
from pdserve.testing.kv_oracle import layouts
from pdserve.transfer import backends
from pdserve.transfer.backends import BACKEND_ORDER, TransferBackend, backend_offers, make_backends
from pdserve.transfer.base import Region
from pdserve.transfer.cuda import host_staging, nvidia
from pdserve.transfer.cuda.driver import CudaError, CudaIpcExport
from pdserve.transfer.rdma import adapters, device_memory, pyverbs_loader
from pdserve.transfer.same_host import cuda_ipc
from pdserve.transfer.select_backend import (
    MAX_FAILURES,
    RETRY_INTERVAL,
    BackendSelector,
    incompatible_reason,
)
from pdserve.transfer.tcp.transport import TcpTransport
from tests.net.certificates import certificate, folder
from tests.support.fake_cuda import FakeCuda

if TYPE_CHECKING:
    from pdserve.transfer.rdma.adapter import QueuePairOptions

PEER = NodeLife(NodeId("p"), 3)
OTHER = NodeLife(NodeId("q"), 3)
HOST_A, HOST_B = ("host a",), ("host b",)

HERE = BackendOffers(
    {"rdma": (), "shm": HOST_A, "tcp": ()}, {"cuda_ipc": "the pool is in host memory"}
)


def choices(*order: str, ours: BackendOffers = HERE) -> BackendSelector:
    return BackendSelector(order or BACKEND_ORDER, ours)


@pytest.mark.parametrize(
    ("theirs", "backend", "why"),
    [
        (HERE, "rdma", "the best there is"),
        (
            BackendOffers({"shm": HOST_A, "tcp": ()}, {"rdma": "there is no RDMA adapter"}),
            "shm",
            "rdma: there is no RDMA adapter (there); cuda_ipc: the pool is in host memory (here)",
        ),
        (
            BackendOffers({"shm": HOST_B, "tcp": ()}, {}),
            "tcp",
            "rdma: not offered (there); cuda_ipc: the pool is in host memory (here); "
            "shm: no place in common: host a here, host b there",
        ),
    ],
)
def test_the_best_that_both_have_in_one_place(
    theirs: BackendOffers, backend: str, why: str
) -> None:
    choice = choices().choose(PEER, theirs, 0.0)
    assert choice.backend == backend
    assert why in choice.why
    assert choice.degraded == ""


def test_what_was_asked_for_is_never_replaced() -> None:
    asked = choices("rdma")
    assert asked.choose(PEER, HERE, 0.0).why == "asked for by name"
    with pytest.raises(TransferRefused, match=r"rdma: no adapter \(there\)"):
        asked.choose(PEER, BackendOffers({"tcp": ()}, {"rdma": "no adapter"}), 0.0)
    for _ in range(5):
        asked.failed(PEER, "rdma", "retries exhausted", 0.0)
    again = asked.choose(PEER, HERE, 1.0)  # there is no other to turn to
    assert again.backend == "rdma"
    assert "there is no other" in again.why


def test_failures_in_a_row_put_a_back_end_off_for_a_while() -> None:
    made = choices()
    for number in range(MAX_FAILURES):
        assert made.choose(PEER, HERE, 10.0).backend == "rdma"
        made.failed(PEER, "rdma", f"reason {number}", 10.0)
    worse = made.choose(PEER, HERE, 10.0)
    assert worse.backend == "shm"
    assert f"rdma failed {MAX_FAILURES} times in a row, lastly: reason 2" in worse.degraded
    assert "shm instead, rdma again in 60 s" in worse.degraded
    assert made.choose(OTHER, HERE, 10.0).backend == "rdma"  # others are not concerned
    assert made.choose(PEER, HERE, 10.0 + RETRY_INTERVAL).backend == "rdma"
    made.failed(PEER, "rdma", "still", 10.0 + RETRY_INTERVAL)  # one is enough now
    assert made.choose(PEER, HERE, 11.0 + RETRY_INTERVAL).backend == "shm"
    made.worked(PEER, "rdma")
    assert made.choose(PEER, HERE, 11.0 + RETRY_INTERVAL).backend == "rdma"


def test_failures_that_are_not_in_a_row_do_not_add_up() -> None:
    made = choices()
    for _ in range(3 * MAX_FAILURES):
        made.failed(PEER, "rdma", "now and then", 0.0)
        made.failed(PEER, "rdma", "now and then", 0.0)
        made.worked(PEER, "rdma")
        assert made.choose(PEER, HERE, 0.0).backend == "rdma"


def test_when_all_have_failed_the_best_is_tried_on() -> None:
    made = choices("shm", "tcp")
    for name in ("shm", "tcp"):
        for _ in range(MAX_FAILURES):
            made.failed(PEER, name, "bad", 0.0)
    assert made.choose(PEER, HERE, 1.0).backend == "shm"


def test_another_life_of_a_peer_begins_afresh() -> None:
    made = choices()
    for _ in range(MAX_FAILURES):
        made.failed(PEER, "rdma", "bad", 0.0)
    made.forget(PEER)
    assert made.choose(PEER, HERE, 0.0).backend == "rdma"


def test_obstacles_are_told_from_the_side_that_has_them() -> None:
    without = BackendOffers({}, {"tcp": "encrypted"})
    assert incompatible_reason("tcp", HERE, HERE) == ""
    assert incompatible_reason("tcp", without, HERE) == "encrypted (here)"
    assert incompatible_reason("tcp", HERE, without) == "encrypted (there)"
    assert incompatible_reason("pigeon", HERE, HERE) == "not offered (here)"


# ------------------------------------------------------------------------------ what there is here


def region(*, view: bool = True, fd: int | None = 3) -> Region:
    (layout,) = layouts(4, 1)
    return Region(layout, 4, memoryview(bytearray(4)) if view else None, fd)


def test_only_possible_ones_are_offered_with_reasons_for_the_rest(monkeypatch) -> None:
    monkeypatch.setattr(backends, "_in_build", lambda module: False)
    offers = backend_offers(make_backends(TransferSpec()), [region()])
    assert list(offers.places) == ["shm", "tcp"]
    assert offers.places["tcp"] == ()
    assert offers.lacking == {"rdma": "this build has none", "cuda_ipc": "this build has none"}
    offers = backend_offers(make_backends(TransferSpec()), [region(fd=None)])
    assert "memfd" in offers.lacking["shm"]
    tls = TransferSpec(tls=("a", "b", "c"))
    assert "tcp" in backend_offers(make_backends(tls), [region()]).places
    with pytest.raises(ConfigError, match="shm: the pool is in device memory"):
        backend_offers(make_backends(TransferSpec()), [region(view=False)])
    with pytest.raises(ConfigError, match="tcp: the pool is in device memory, and this build"):
        backend_offers(make_backends(TransferSpec()), [region(view=False)])


def test_tcp_is_offered_for_device_memory_that_can_be_staged(monkeypatch) -> None:
    monkeypatch.setattr(nvidia, "unavailable_reason", lambda: None)
    (tcp,) = make_backends(TransferSpec(backends=("tcp",)))
    for why in ("", "cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY"):
        monkeypatch.setattr(host_staging, "unsupported_reason", lambda regions, why=why: why)
        assert why in tcp.lacking([region(view=False)])
        assert bool(tcp.lacking([region(view=False)])) == bool(why)
    monkeypatch.setattr(nvidia, "unavailable_reason", lambda: "no NVIDIA driver here")
    assert "cannot be staged: no NVIDIA driver here" in tcp.lacking([region(view=False)])


def test_an_impossible_wish_fails_by_name_with_a_remedy(monkeypatch) -> None:
    monkeypatch.setattr(backends._Rdma, "lacking", lambda *_: "there is no RDMA adapter")
    with pytest.raises(ConfigError, match=r"rdma: there is no RDMA adapter.*--transfer=auto"):
        backend_offers(make_backends(TransferSpec(backends=("rdma",))), [region()])
    with pytest.raises(ConfigError, match=r"pigeon.*known: rdma, cuda_ipc, shm, tcp"):
        make_backends(TransferSpec(backends=("pigeon",)))


class PlayedAdapters:
    """`rdma.adapters.Adapters` of a machine that has an adapter."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.opened = self.closed = 0
        self.asked: list[object] = []

    def __call__(
        self, regions: object, devices: object, options: QueuePairOptions
    ) -> PlayedAdapters:
        self.asked = [regions, devices, options.traffic_class]
        return self

    def open(self) -> None:
        if self.fails:
            raise TransferError(self.fails)
        self.opened += 1

    def close(self) -> None:
        self.closed += 1


def rdma_of(
    monkeypatch, played: PlayedAdapters, *, lacks: str = "", **fields: Any
) -> TransferBackend:
    monkeypatch.setattr(pyverbs_loader, "unavailable_reason", lambda: None)
    monkeypatch.setattr(device_memory, "unsupported_reason", lambda regions: lacks)
    monkeypatch.setattr(adapters, "Adapters", played)
    (backend,) = make_backends(TransferSpec(backends=("rdma",), **fields))
    return backend


def test_pools_are_registered_before_rdma_is_offered_and_until_it_is_closed(monkeypatch) -> None:
    played = PlayedAdapters()
    backend = rdma_of(monkeypatch, played, rdma_devices=("mlx5_0:1:3",), rdma_traffic_class=106)
    regions = [region()]
    assert list(backend_offers([backend], regions).places) == ["rdma"]
    assert (played.opened, played.closed) == (1, 0)
    assert played.asked == [regions, ("mlx5_0:1:3",), 106]
    backend.close()
    backend.close()
    assert played.closed == 1


def test_rdma_is_named_as_missing_where_the_pool_cannot_be_registered(monkeypatch, caplog) -> None:
    full = rdma_of(monkeypatch, PlayedAdapters(fails="cannot be registered (see ulimit -l)"))
    with pytest.raises(ConfigError, match="ulimit -l"):
        backend_offers([full], [region()])
    assert "ulimit -l" in caplog.text
    lacks = rdma_of(monkeypatch, PlayedAdapters(), lacks="nvidia-peermem is not loaded")
    with pytest.raises(ConfigError, match="nvidia-peermem"):
        backend_offers([lacks], [region(view=False)])


@pytest.mark.parametrize("verify", ["all", "sample", "off"])
def test_a_check_that_rdma_cannot_do_excludes_it_by_name(monkeypatch, caplog, verify) -> None:
    backend = rdma_of(monkeypatch, PlayedAdapters(), verify=verify)
    assert backend.lacking([region()]) == ""
    assert not caplog.text
    why = backend.lacking([region(view=False)])
    assert ("--verify-kv=all" in why) == (verify == "all")
    assert ("does not compare" in caplog.text) == (verify == "sample")
    backend.close()


def test_a_pool_that_cannot_be_exported_is_found_out_before_it_is_offered() -> None:
    class Expandable(FakeCuda):
        def export(self, address: int, size: int) -> CudaIpcExport:
            raise CudaError("cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE: expandable segments")

    for driver, why in ((FakeCuda(Random(1)), ""), (Expandable(Random(1)), "expandable segments")):
        address = driver.allocate(1 << 16)
        (layout,) = layouts(4, 1)
        found = cuda_ipc.unsupported_reason([Region(layout, 4, address=address)], driver)
        assert why in found
        assert bool(found) == bool(why)
        driver.free(address)


def test_a_side_that_is_reached_from_anywhere_has_every_place() -> None:
    here, there = BackendOffers({"rdma": ()}, {}), BackendOffers({"rdma": ("RoCE",)}, {})
    assert (
        incompatible_reason("rdma", here, there) == incompatible_reason("rdma", there, here) == ""
    )


def test_one_host_is_one_kernel_network_and_user() -> None:
    (place,) = backend_offers(make_backends(TransferSpec(backends=("shm",))), [region()]).places[
        "shm"
    ]
    assert Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip() in place
    assert f"user {os.geteuid()}" in place


@pytest.mark.parametrize(("asked", "over_tcp"), [("off", "off"), ("sample", "all"), ("all", "all")])
async def test_tcp_checks_all_unless_nothing_is_to_be_checked(asked, over_tcp) -> None:
    made = make_tcp(TransferSpec(backends=("tcp",), verify=asked, host="127.0.0.1"))
    assert made.verify == over_tcp
    assert made._tls is None


async def test_tcp_is_encrypted_where_links_are() -> None:
    cert, key = certificate("w", "ca")
    for ca in (str(folder() / "ca.pem"), ""):
        made = make_tcp(TransferSpec(backends=("tcp",), tls=(str(cert), str(key), ca)))
        assert made._tls is not None
    with pytest.raises(ConfigError, match="tls-cert /nowhere"):
        make_tcp(TransferSpec(backends=("tcp",), tls=("/nowhere", str(key), "")))


def make_tcp(spec: TransferSpec) -> TcpTransport:
    async def ask(*_: object):
        raise AssertionError

    (backend,) = make_backends(spec)
    made = backend.make(PEER, [region()], ask)
    assert isinstance(made, TcpTransport)
    return made


def test_nothing_is_made_before_it_is_wanted() -> None:
    def make(key, regions, ask):
        raise AssertionError

    offers = backend_offers(
        [TransferBackend(name="x", make=make), TransferBackend(name="y", make=make)], [region()]
    )
    assert list(offers.places) == ["x", "y"]
