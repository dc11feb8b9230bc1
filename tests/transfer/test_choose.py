"""Which back end joins a pair: the best that both have in one place, no other in silence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.errors import ConfigError, TransferRefused
from pdserve.ids import NodeId
from pdserve.messages.engine import TransferSpec
from pdserve.messages.transfer import Offers
from pdserve.testing.kv_oracle import layouts
from pdserve.transfer import backends
from pdserve.transfer.backends import ORDER, BackEnd, offers_of, standard
from pdserve.transfer.base import PeerKey, Region
from pdserve.transfer.choose import AGAIN, FAILURES, Choices, obstacle
from pdserve.transfer.tcp import TcpTransport
from tests.net.certificates import certificate, folder

PEER = PeerKey(NodeId("p"), 3)
OTHER = PeerKey(NodeId("q"), 3)
HOST_A, HOST_B = ("host a",), ("host b",)

HERE = Offers({"rdma": (), "shm": HOST_A, "tcp": ()}, {"cuda_ipc": "the pool is in host memory"})


def choices(*order: str, ours: Offers = HERE) -> Choices:
    return Choices(order or ORDER, ours)


@pytest.mark.parametrize(
    ("theirs", "backend", "why"),
    [
        (HERE, "rdma", "the best there is"),
        (
            Offers({"shm": HOST_A, "tcp": ()}, {"rdma": "there is no RDMA adapter"}),
            "shm",
            "rdma: there is no RDMA adapter (there); cuda_ipc: the pool is in host memory (here)",
        ),
        (
            Offers({"shm": HOST_B, "tcp": ()}, {}),
            "tcp",
            "rdma: not offered (there); cuda_ipc: the pool is in host memory (here); "
            "shm: no place in common: host a here, host b there",
        ),
    ],
)
def test_the_best_that_both_have_in_one_place(theirs: Offers, backend: str, why: str) -> None:
    choice = choices().choose(PEER, theirs, 0.0)
    assert choice.backend == backend
    assert why in choice.why
    assert choice.degraded == ""


def test_what_was_asked_for_is_never_replaced() -> None:
    asked = choices("rdma")
    assert asked.choose(PEER, HERE, 0.0).why == "asked for by name"
    with pytest.raises(TransferRefused, match=r"rdma: no adapter \(there\)"):
        asked.choose(PEER, Offers({"tcp": ()}, {"rdma": "no adapter"}), 0.0)
    for _ in range(5):
        asked.failed(PEER, "rdma", "retries exhausted", 0.0)
    again = asked.choose(PEER, HERE, 1.0)  # there is no other to turn to
    assert again.backend == "rdma"
    assert "there is no other" in again.why


def test_failures_in_a_row_put_a_back_end_off_for_a_while() -> None:
    made = choices()
    for number in range(FAILURES):
        assert made.choose(PEER, HERE, 10.0).backend == "rdma"
        made.failed(PEER, "rdma", f"reason {number}", 10.0)
    worse = made.choose(PEER, HERE, 10.0)
    assert worse.backend == "shm"
    assert f"rdma failed {FAILURES} times in a row, lastly: reason 2" in worse.degraded
    assert "shm instead, rdma again in 60 s" in worse.degraded
    assert made.choose(OTHER, HERE, 10.0).backend == "rdma"  # others are not concerned
    assert made.choose(PEER, HERE, 10.0 + AGAIN).backend == "rdma"
    made.failed(PEER, "rdma", "still", 10.0 + AGAIN)  # one is enough now
    assert made.choose(PEER, HERE, 11.0 + AGAIN).backend == "shm"
    made.worked(PEER, "rdma")
    assert made.choose(PEER, HERE, 11.0 + AGAIN).backend == "rdma"


def test_failures_that_are_not_in_a_row_do_not_add_up() -> None:
    made = choices()
    for _ in range(3 * FAILURES):
        made.failed(PEER, "rdma", "now and then", 0.0)
        made.failed(PEER, "rdma", "now and then", 0.0)
        made.worked(PEER, "rdma")
        assert made.choose(PEER, HERE, 0.0).backend == "rdma"


def test_when_all_have_failed_the_best_is_tried_on() -> None:
    made = choices("shm", "tcp")
    for name in ("shm", "tcp"):
        for _ in range(FAILURES):
            made.failed(PEER, name, "bad", 0.0)
    assert made.choose(PEER, HERE, 1.0).backend == "shm"


def test_another_life_of_a_peer_begins_afresh() -> None:
    made = choices()
    for _ in range(FAILURES):
        made.failed(PEER, "rdma", "bad", 0.0)
    made.forget(PEER)
    assert made.choose(PEER, HERE, 0.0).backend == "rdma"


def test_obstacles_are_told_from_the_side_that_has_them() -> None:
    without = Offers({}, {"tcp": "encrypted"})
    assert obstacle("tcp", HERE, HERE) == ""
    assert obstacle("tcp", without, HERE) == "encrypted (here)"
    assert obstacle("tcp", HERE, without) == "encrypted (there)"
    assert obstacle("pigeon", HERE, HERE) == "not offered (here)"


# ------------------------------------------------------------------------------ what there is here


def region(*, view: bool = True, fd: int | None = 3) -> Region:
    (layout,) = layouts(4, 1)
    return Region(layout, 4, memoryview(bytearray(4)) if view else None, fd)


def test_only_possible_ones_are_offered_with_reasons_for_the_rest(monkeypatch) -> None:
    monkeypatch.setattr(backends, "_module", lambda name: None)
    offers = offers_of(standard(TransferSpec()), [region()])
    assert list(offers.places) == ["shm", "tcp"]
    assert offers.places["tcp"] == ()
    assert offers.lacking == {"rdma": "this build has none", "cuda_ipc": "this build has none"}
    offers = offers_of(standard(TransferSpec()), [region(fd=None)])
    assert "memfd" in offers.lacking["shm"]
    tls = TransferSpec(tls=("a", "b", "c"))
    assert "tcp" in offers_of(standard(tls), [region()]).places
    with pytest.raises(ConfigError, match="shm: the pool is in device memory"):
        offers_of(standard(TransferSpec()), [region(view=False)])


def test_an_impossible_wish_fails_by_name_with_a_remedy(monkeypatch) -> None:
    monkeypatch.setattr(backends, "_lacking_rdma", lambda regions: "there is no RDMA adapter")
    with pytest.raises(ConfigError, match=r"rdma: there is no RDMA adapter.*--transfer=auto"):
        offers_of(standard(TransferSpec(backends=("rdma",))), [region()])
    with pytest.raises(ConfigError, match=r"pigeon.*there are rdma, cuda_ipc, shm, tcp"):
        standard(TransferSpec(backends=("pigeon",)))


def test_a_side_that_is_reached_from_anywhere_has_every_place() -> None:
    here, there = Offers({"rdma": ()}, {}), Offers({"rdma": ("RoCE",)}, {})
    assert obstacle("rdma", here, there) == obstacle("rdma", there, here) == ""


def test_one_host_is_one_kernel_network_and_user() -> None:
    (place,) = offers_of(standard(TransferSpec(backends=("shm",))), [region()]).places["shm"]
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

    (backend,) = standard(spec)
    made = backend.make(PEER, [region()], ask)
    assert isinstance(made, TcpTransport)
    return made


def test_nothing_is_made_before_it_is_wanted() -> None:
    def make(key, regions, ask):
        raise AssertionError

    offers = offers_of([BackEnd(name="x", make=make), BackEnd(name="y", make=make)], [region()])
    assert list(offers.places) == ["x", "y"]
